"""The command `rl-metrics`."""

import argparse
from collections.abc import Sequence

from rl_metrics.commands import check, compare, doctor, importing, plot, report, rules, serve
from rl_metrics.commands import list as listing

VERBS = (listing, plot, compare, importing, report, serve, check, doctor, rules)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit status: 0, or 2 when nothing matches, or nothing can be drawn; `check` also has 1, for findings.
    """
    arguments = _parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl-metrics", description="What a run says.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add_to(verbs)
    return parser
