"""Worker process of `CheckProcesses`. Requests and answers are JSON lines on stdin and stdout.

A library's own timeouts use signals, which work only in the main thread and not inside C code. Here the kernel kills
the whole process when a request takes too long.
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
"""Reads a request's row, and returns the function that checks its response. Raises if the row is invalid."""


def main(prepare: Prepare, wrong: dict[str, Any]) -> None:
    """Limit the memory, keep stdout for answers, and serve requests until stdin ends.

    Args:
        prepare: Reads a request's row.
        wrong: Verdict on a response whose check raises.
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
    """Answer one request with a line about the row and, if the row is valid, a line about the response."""
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
    """The check of the response showed that the row is invalid."""


def print_line(answers: IO[str], value: dict[str, Any]) -> None:
    """Write one JSON line and flush it."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()
