"""`rl-metrics plot`: plot metrics of runs to an image."""

import argparse
from pathlib import Path

from rl_metrics.commands.parts import Verbs, require_own
from rl_metrics.comparison.plot import ACROSS, Plot, ReferenceLine, plot_runs


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("plot", help="Plot metrics: one panel per metric, one line per run.")
    parser.add_argument("folder", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument(
        "--metric", action="append", required=True, metavar="GLOB", help="a panel each, such as 'actor/*'; repeatable"
    )
    parser.add_argument("--label", action="append", default=[], metavar="TEXT", help="of the runs, in their order")
    parser.add_argument("--x", choices=list(ACROSS), default="step", help="step, or seconds since the first began")
    parser.add_argument(
        "--line",
        action="append",
        default=[],
        metavar="[METRIC=]VALUE[:LABEL]",
        help="a horizontal line, in the metric's panel or in all; may be repeated",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="ends in .svg or .png")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    for path in arguments.folder:
        require_own(path)
    lines = [ReferenceLine.parse(text) for text in arguments.line]
    plot = Plot(metrics=arguments.metric, labels=arguments.label, across=arguments.x, lines=lines)
    plot_runs(arguments.folder, arguments.output, plot=plot)
    return 0
