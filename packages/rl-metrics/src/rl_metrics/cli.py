"""The command `rl-metrics`."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from rl_metrics.listing import as_json, as_markdown, matching, show
from rl_metrics.trackers.console_views import RunConsole

USAGE_ERROR = 2

PIPE_WIDTH = 180
"""Columns of a table that no terminal shows, so that grep finds whole rows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit status: 0, or 2 when nothing matches.
    """
    arguments = _parser().parse_args(argv)
    chapters = matching(arguments.pattern)
    if not chapters:
        Console(stderr=True).print(
            f"no metric has {arguments.pattern!r} in its name or meaning; `rl-metrics list` shows all.", markup=False
        )
        return USAGE_ERROR
    if arguments.json:
        sys.stdout.write(as_json(chapters))
    elif arguments.markdown:
        sys.stdout.write(as_markdown(chapters))
    else:
        console = RunConsole()
        show(chapters, console if console.is_terminal else RunConsole(width=PIPE_WIDTH))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl-metrics", description="What a run says.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="every metric: name, unit, reduction, meaning, healthy values")
    listing.add_argument("pattern", nargs="?", default="", help="only those with this text in name or meaning")
    form = listing.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as the page docs/metrics.md")
    return parser
