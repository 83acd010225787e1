"""The command `rl-core`."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import RLError
from rl_core.queue.journal.inspection import as_text, inspect_journal
from rl_core.terminal_text import describe_version, json_text, printable, use_utf8, write_out

REFUSED = 2
DEFAULT_LIMIT = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program name; None uses sys.argv.

    Returns:
        The exit status: 0, or 2 if the directory is not a queue, is damaged, or has another format version.
    """
    if argv is None:
        use_utf8()
    arguments = _parser().parse_args(argv)
    limit = arguments.limit
    if limit is None and not arguments.json:
        limit = DEFAULT_LIMIT
    try:
        report = inspect_journal(arguments.directory, limit=limit)
    except RLError as error:
        sys.stderr.write(f"rl-core: {printable(str(error), width=None)}\n")
        return REFUSED
    with contextlib.suppress(BrokenPipeError):  # a closed reader is not an error
        write_out(json_text(report) if arguments.json else as_text(report))
    return 0


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0; found {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl-core", description="Inspect a transfer queue's directory.")
    parser.add_argument("--version", action="version", version=describe_version("rl-core"))
    parts = parser.add_subparsers(dest="part", required=True)
    queue = parts.add_parser("queue", help="inspect a transfer queue", description="Inspect a queue's directory.")
    verbs = queue.add_subparsers(dest="verb", required=True)
    inspect = verbs.add_parser("inspect", help="show the contents of a queue's directory; read-only, safe while in use")
    inspect.add_argument("directory", type=Path, metavar="DIR", help="queue directory, as set in QueueOptions")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.add_argument(
        "--limit",
        type=_limit,
        metavar="N",
        help=f"maximum number of prompts to show, in issue order (default: {DEFAULT_LIMIT}; with --json, all)",
    )
    return parser
