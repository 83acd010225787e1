"""The command `rl-metrics`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rl_core.errors import RLError
from rl_metrics.listing import as_json, as_markdown, matching, show
from rl_metrics.plot import ACROSS, Plot, ReferenceLine, plot_runs
from rl_metrics.trackers.console_views import RunConsole

USAGE_ERROR = 2

PIPE_WIDTH = 180
"""Columns of a table that no terminal shows, so that grep finds whole rows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit status: 0, or 2 when nothing matches, or nothing can be drawn.
    """
    arguments = _parser().parse_args(argv)
    return _list(arguments) if arguments.verb == "list" else _plot(arguments)


def _list(arguments: argparse.Namespace) -> int:
    chapters = matching(arguments.pattern)
    if not chapters:
        return _refuse(f"no metric has {arguments.pattern!r} in its name or meaning; `rl-metrics list` shows all.")
    if arguments.json:
        sys.stdout.write(as_json(chapters))
    elif arguments.markdown:
        sys.stdout.write(as_markdown(chapters))
    else:
        console = RunConsole()
        show(chapters, console if console.is_terminal else RunConsole(width=PIPE_WIDTH))
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    try:
        lines = [ReferenceLine.parse(text) for text in arguments.line]
        plot = Plot(metrics=arguments.metric, labels=arguments.label, across=arguments.x, lines=lines)
        plot_runs(arguments.run, arguments.output, plot=plot)
    except (RLError, OSError) as error:
        return _refuse(str(error))
    return 0


def _refuse(reason: str) -> int:
    Console(stderr=True, soft_wrap=True).print(reason, markup=False, highlight=False)
    return USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl-metrics", description="What a run says.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="every metric: name, unit, reduction, meaning, healthy values")
    listing.add_argument("pattern", nargs="?", default="", help="only those with this text in name or meaning")
    form = listing.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as the page docs/metrics.md")
    plot = verbs.add_parser("plot", help="metrics of runs as a picture: a panel a metric, a line a run")
    plot.add_argument("run", nargs="+", type=Path, help="folder of a run, with its metrics.jsonl")
    plot.add_argument("--metric", action="append", required=True, metavar="NAME", help="a panel; may be repeated")
    plot.add_argument("--label", action="append", default=[], metavar="TEXT", help="of the runs, in their order")
    plot.add_argument("--x", choices=list(ACROSS), default="step", help="step, or seconds since the first began")
    plot.add_argument(
        "--line",
        action="append",
        default=[],
        metavar="[METRIC=]VALUE[:LABEL]",
        help="a horizontal line, in the metric's panel or in all; may be repeated",
    )
    plot.add_argument("--output", type=Path, required=True, metavar="FILE", help="ends in .svg or .png")
    return parser
