"""What verbs share."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rl_core.data import Json
from rl_core.errors import DataError
from rl_core.terminal_text import escaped_lines
from rl_metrics.importers.recognition import misplaced
from rl_metrics.run_files.run_record import RunRecord, has_begun, open_run
from rl_metrics.trackers.console_views import RunConsole
from rl_metrics.trackers.text import plain_text

USAGE_ERROR = 2
MAX_LINE = 4_000
PIPE_WIDTH = 180
"""Columns of a table outside a terminal, so that grep finds whole rows."""

Run = Callable[[argparse.Namespace], int]
"""Does what a verb was asked for; gives the exit status."""


class Verbs:
    """Where verbs add their parsers."""

    def __init__(self, parser: argparse.ArgumentParser, *, called: str = "VERB") -> None:
        """Let a parser take one of several verbs.

        Args:
            parser: Of what stands before the verb.
            called: What its help calls them.
        """
        self._parsers = parser.add_subparsers(dest=called.lower(), required=True, metavar=called)

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser:  # noqa: A002 - argparse's name
        """A parser for a verb; what it is for is in the list of verbs, and in its own help."""
        return self._parsers.add_parser(name, help=help, description=help)


def require_own(path: Path) -> None:
    """Refuse files of another trainer, which are no run of this project before they are imported.

    Raises:
        DataError: It names the importer.
    """
    foreign = misplaced([path]) if path.is_file() or not has_begun(path) else ""
    if foreign:
        raise DataError(foreign)


def opened_run(path: Path) -> RunRecord:
    """See `open_run`; of another trainer's files, the error names the importer."""
    require_own(path)
    return open_run(path)


def table_console() -> Console:
    """A console for tables: the terminal's, else a wide one."""
    console = RunConsole()
    return console if console.is_terminal else RunConsole(width=PIPE_WIDTH)


def say(text: str, *, style: str = "", limit: int = MAX_LINE) -> None:
    """Print one line, not wrapped, which nothing in the text can garble; a longer text is cut in its middle."""
    RunConsole(soft_wrap=True).print(Text(plain_text(text, limit=limit), style=style))


def say_json(document: Json) -> None:
    """Print JSON."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def refuse(reason: str) -> int:
    """Say on standard error why nothing was done; gives the exit status."""
    Console(stderr=True, soft_wrap=True).print(escaped_lines(reason), markup=False, highlight=False)
    return USAGE_ERROR
