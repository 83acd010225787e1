"""How benchmarks/transfer.py talks to the process of a system: lines of JSON, one answer to each request.

    -> (started)                                      <- "ready", once it is warm
    -> {"operation": "bulk"}                          <- {"put_s": s, "get_s": s}
    -> {"operation": "small", "num_calls": n}         <- {"put_ms": [n], "get_ms": [n]}
    -> {"operation": "lease", "num_rows": n, "batch_rows": b, "num_calls": c}
                                                      <- {"lease_ms": [c]} or {"reason": "..."}
    -> {"operation": "memory"}                        <- {"peak_bytes": n, "payload_bytes": n} or null
    -> {"operation": "versions"}                      <- {package: version}
    -> {"operation": "quit"}, or end of input         <- (ends with status 0)

A request that fails is answered {"error": "..."}, and the process ends with status 1.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, TextIO

PACKAGES = ("rl-core", "TransferQueue", "ray", "torch", "tensordict", "pyzmq", "numpy")
WARM_UP_CALLS = 16


class System(Protocol):
    """What is measured."""

    def bulk(self) -> dict[str, float]:
        """Run one round: all producers put from a common start, then the consumer gets everything.

        Returns:
            put_s, from the common start to the end of the last put; get_s, the consumer's time for metadata, data and
            reading every byte once (by `look`, unless the system itself did it for a checksum); ack_s for systems with
            an ack. Clearing the round afterwards is not timed.
        """

    def small(self, *, num_calls: int) -> dict[str, list[float]]:
        """Run puts of one 1 KB sample by 8 clients in closed loops, then as many gets of one sample.

        Args:
            num_calls: Number of puts, and of gets, of all clients together.

        Returns:
            put_ms and get_ms, the time of each call. A get is metadata and data.
        """

    def lease(self, *, num_rows: int, batch_rows: int, num_calls: int) -> dict[str, Any]:
        """Put rows (not timed), then repeatedly lease some for a task without returning any.

        Args:
            num_rows: Rows in the queue at the start.
            batch_rows: Rows per call.
            num_calls: Number of calls.

        Returns:
            lease_ms, the time of each call; or reason, why it was not measured.
        """

    def memory(self) -> dict[str, int] | None:
        """Return peak_bytes that the system used for payload_bytes of payload; None if not measured."""


def serve(opened: Callable[[], AbstractContextManager[System]]) -> int:
    """Start the system, warm it up, answer requests until there are no more, and return the exit status."""
    answers = private_stdout()
    try:
        with opened() as system:
            system.bulk()
            system.small(num_calls=WARM_UP_CALLS)
            write(answers, "ready")
            for line in sys.stdin:
                request = json.loads(line)
                if request["operation"] == "quit":
                    break
                write(answers, json.dumps(answer(system, **request)))
    except Exception as error:
        traceback.print_exc()
        write(answers, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


def answer(system: System, operation: str, **arguments: int) -> Any:
    """Return the system's answer to a request."""
    match operation:
        case "bulk":
            return system.bulk()
        case "small":
            return system.small(**arguments)
        case "lease":
            return system.lease(**arguments)
        case "memory":
            return system.memory()
        case "versions":
            return versions()
        case _:
            raise ValueError(f"operation must be one of this module's list; found {operation!r}.")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of the relevant packages that this process's environment has."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def private_stdout() -> TextIO:
    """Reserve standard output for answers; other output, including that of children, goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def write(answers: TextIO, line: str) -> None:
    """Send a line at once."""
    answers.write(line + "\n")
    answers.flush()
