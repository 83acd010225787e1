"""`rl-metrics list`: every metric."""

import argparse
import sys

from rl_metrics.commands.parts import Verbs, refuse
from rl_metrics.listing import as_json, as_markdown, matching, show
from rl_metrics.trackers.console_views import RunConsole

PIPE_WIDTH = 180
"""Columns of a table that no terminal shows, so that grep finds whole rows."""


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("list", help="every metric: name, unit, reduction, meaning, healthy values")
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="only those with this text in name or meaning, or whose name fits a glob, such as 'actor/*'",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as the page docs/metrics.md")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    chapters = matching(arguments.pattern)
    if not chapters:
        return refuse(f"no metric has {arguments.pattern!r} in its name or meaning; `rl-metrics list` shows all.")
    if arguments.json:
        sys.stdout.write(as_json(chapters))
    elif arguments.markdown:
        sys.stdout.write(as_markdown(chapters))
    else:
        console = RunConsole()
        show(chapters, console if console.is_terminal else RunConsole(width=PIPE_WIDTH))
    return 0
