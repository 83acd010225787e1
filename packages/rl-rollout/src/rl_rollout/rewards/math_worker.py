"""The process in which math-verify runs: requests and answers are JSON lines on stdin and stdout.

math-verify guards itself with signals, which work in a main thread alone, and not while sympy computes
a huge power. Here the kernel ends the whole process when a request takes too long, whatever it does.
"""

import json
import logging
import os
import resource
import signal
import sys
from typing import IO, Any

MEMORY_BYTES = 4 << 30


def serve(requests: IO[str], answers: IO[str], *, timeout_s: float) -> None:
    """Answer requests until their stream ends; die by SIGALRM when one takes longer than timeout_s."""
    from math_verify import parse, verify

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    print_line(answers, {"is_ready": True})
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            gold = parse(request["gold"], parsing_timeout=None)
            found = parse(request["answer"], parsing_timeout=None)
            answer: dict[str, Any] = {
                "is_equal": bool(gold and found and verify(gold, found, timeout_seconds=None)),
                "is_gold_parsed": bool(gold),
            }
        except (Exception, RecursionError, MemoryError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print_line(answers, answer)


def print_line(answers: IO[str], value: dict[str, Any]) -> None:
    """Write one JSON line at once."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def main() -> None:
    """Keep stdout for answers, whatever a library prints, and bound the memory."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time-outs are off
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(sys.stdin, answers, timeout_s=float(sys.argv[1]))


if __name__ == "__main__":
    main()
