"""The command `rl-metrics`."""

import sys
from collections.abc import Sequence

import structlog

from rl_core.errors import RLError
from rl_core.terminal_text import describe_version, escaped_event, print_uncaught, use_utf8
from rl_metrics.commands import check, compare, doctor, importing, report, rules
from rl_metrics.commands import list as listing
from rl_metrics.commands.parts import Parser, Run, add_verbs, refuse

VERBS = (listing, compare, importing, report, check, doctor, rules)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None uses those of the process.

    Returns:
        The exit status: 0 on success, 2 on an error; `check` and `doctor` return 1 for findings.
    """
    if argv is None:
        use_utf8()
    arguments = _parser().parse_args(argv)
    if not structlog.is_configured():  # warnings, which are not part of a verb's output
        *before, renderer = structlog.get_config()["processors"]
        sys.excepthook = print_uncaught
        structlog.configure(
            processors=[*before, escaped_event, renderer], logger_factory=lambda *_: structlog.PrintLogger(sys.stderr)
        )
    run: Run = arguments.run
    try:
        return run(arguments)
    except RLError as error:
        return refuse(str(error))
    except OSError as error:
        why = error.strerror or str(error)
        return refuse(why if error.filename is None else f"{error.filename} cannot be read or written: {why}.")


def _parser() -> Parser:
    parser = Parser(prog="rl-metrics", description="Inspect, compare and diagnose training runs.")
    parser.add_argument("--version", action="version", version=describe_version("rl-metrics"))
    add_verb = add_verbs(parser)
    for verb in VERBS:
        verb.add_to(add_verb)
    return parser
