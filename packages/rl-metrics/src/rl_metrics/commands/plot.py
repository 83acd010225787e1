"""`rl-metrics plot`: plot metrics of runs to an image."""

import argparse
from pathlib import Path

from rl_metrics.commands.parts import Verbs, require_own
from rl_metrics.comparison.plot import ACROSS, Plot, ReferenceLine, plot_runs


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("plot", help="plot metrics to an image: one panel per metric, one line per run")
    parser.add_argument("folder", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument(
        "--metric",
        action="append",
        required=True,
        metavar="GLOB",
        help="metrics to plot, one panel each, such as 'actor/*'; repeatable",
    )
    parser.add_argument(
        "--label", action="append", default=[], metavar="TEXT", help="label of each run, in order; repeatable"
    )
    parser.add_argument(
        "--x",
        choices=list(ACROSS),
        default="step",
        help="horizontal axis: step, or seconds since the first step began (default: step)",
    )
    parser.add_argument(
        "--line",
        action="append",
        default=[],
        metavar="[METRIC=]VALUE[:LABEL]",
        help="a horizontal line in the metric's panel, or in all; repeatable",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="image to write; .svg or .png")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    for path in arguments.folder:
        require_own(path)
    lines = [ReferenceLine.parse(text) for text in arguments.line]
    plot = Plot(metrics=arguments.metric, labels=arguments.label, across=arguments.x, lines=lines)
    plot_runs(arguments.folder, arguments.output, plot=plot)
    return 0
