"""What verbs share."""

import argparse
from collections.abc import Callable
from typing import Protocol

from rich.console import Console

USAGE_ERROR = 2

Run = Callable[[argparse.Namespace], int]
"""Does what a verb was asked for; gives the exit status."""


class Verbs(Protocol):
    """Where a verb adds its parser: what `ArgumentParser.add_subparsers` gives."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser:  # noqa: A002 - argparse's name
        """A parser for a verb."""
        ...


def refuse(reason: str) -> int:
    """Say on standard error why nothing was done; gives the exit status."""
    Console(stderr=True, soft_wrap=True).print(reason, markup=False, highlight=False)
    return USAGE_ERROR
