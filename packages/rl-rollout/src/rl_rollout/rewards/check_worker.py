"""A process of `CheckProcesses`: requests and answers are JSON lines on stdin and stdout.

A library's own time-outs use signals, which work in a main thread alone, and not while it is inside C code. Here
the kernel ends the whole process when a request takes too long, whatever it does.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

MEMORY_BYTES = 1 << 30

Prepare = Callable[[dict[str, Any]], Callable[[], dict[str, Any]]]
"""Takes a request's row, and gives what judges its response; what it raises is the row's fault."""


def main(prepare: Prepare, wrong: dict[str, Any]) -> None:
    """Keep stdout for answers, whatever a library prints, bound the memory, and serve until the requests end.

    Args:
        prepare: Reads a request's row.
        wrong: The verdict on a response whose check raises.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print_line(answers, {"is_ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
        serve(json.loads(line), prepare, wrong, answers)
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(request: dict[str, Any], prepare: Prepare, wrong: dict[str, Any], answers: IO[str]) -> None:
    """Answer one request: a line about the row, and one about the response where the row is right."""
    try:
        judge = prepare(request)
    except Exception as error:
        print_line(answers, {"row_error": f"{error}"[:500]})
        return
    print_line(answers, {})
    try:
        verdict = judge()
    except RowError as error:
        verdict = {"row_error": f"{error}"[:500]}
    except Exception as error:
        verdict = {**wrong, "error": f"{type(error).__name__}: {error}"[:300]}
    print_line(answers, verdict)


class RowError(Exception):
    """The row is at fault, as turned out while the response was judged."""


def print_line(answers: IO[str], value: dict[str, Any]) -> None:
    """Write one JSON line at once."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()
