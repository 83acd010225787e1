"""Parser, console and errors shared by the verbs."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from rl_core.data import Json
from rl_core.errors import DataError
from rl_core.terminal_text import escaped_lines
from rl_metrics.importers.recognition import misplaced
from rl_metrics.run_files.run_record import RunRecord, has_begun, open_run
from rl_metrics.trackers.console import RunConsole, plain_text

USAGE_ERROR = 2
MAX_LINE = 4_000
PIPE_WIDTH = 180
"""Width of tables outside a terminal, in characters; wide enough for grep to find whole rows."""

Run = Callable[[argparse.Namespace], int]
"""Runs a verb and returns the exit status."""

AddVerb = Callable[[str, str], argparse.ArgumentParser]
"""Adds a verb's parser, given its name and help."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the nearest choice, as argparse's `suggest_on_error` does from Python 3.14 on."""

    def error(self, message: str) -> NoReturn:
        """Print usage and error, and exit with status 2."""
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        near = difflib.get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), n=1) if found else []
        super().error(f"{message}. Did you mean {near[0]!r}?" if near else message)


def add_verbs(parser: argparse.ArgumentParser, *, called: str = "VERB") -> AddVerb:
    """Return a function that adds the parser of a verb; its help is in the list of verbs and in the verb's own help.

    Args:
        parser: Parser of the arguments before the verb.
        called: Name of the verb in help and errors.
    """
    parsers = parser.add_subparsers(dest=called.lower(), required=True, metavar=called)
    return lambda name, text: parsers.add_parser(name, help=text, description=text)


def require_own(path: Path) -> None:
    """Refuse files of another trainer that were not imported.

    Raises:
        DataError: The path holds such files; the message names the importer.
    """
    foreign = misplaced([path]) if path.is_file() or not has_begun(path) else ""
    if foreign:
        raise DataError(foreign)


def opened_run(path: Path) -> RunRecord:
    """Open a run, as `open_run` does; for another trainer's files, the error names the importer."""
    require_own(path)
    return open_run(path)


def table_console(*, width: int = PIPE_WIDTH) -> Console:
    """Return a console for tables: the terminal's, or one of this width."""
    console = RunConsole()
    return console if console.is_terminal else RunConsole(width=width)


def say(text: str, *, style: str = "", limit: int = MAX_LINE) -> None:
    """Print one unwrapped line, with control characters escaped; text over the limit is cut in its middle."""
    RunConsole(soft_wrap=True).print(Text(plain_text(text, limit=limit), style=style))


def say_json(document: Json) -> None:
    """Print JSON."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def refuse(reason: str) -> int:
    """Print an error to stderr, with the prefix of argparse's errors, and return the exit status."""
    text = f"rl-metrics: error: {escaped_lines(reason)}"
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
    return USAGE_ERROR
