"""What verbs share."""

import argparse
from collections.abc import Callable

from rich.console import Console

from rl_metrics.trackers.console_views import RunConsole

USAGE_ERROR = 2

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


def say(text: str) -> None:
    """Print a line as it is, however long."""
    RunConsole(soft_wrap=True).print(text, markup=False, highlight=False)


def refuse(reason: str) -> int:
    """Say on standard error why nothing was done; gives the exit status."""
    Console(stderr=True, soft_wrap=True).print(reason, markup=False, highlight=False)
    return USAGE_ERROR
