"""Worker processes that check responses with a library, with limits on time and memory."""

import contextlib
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

from rl_core.data import Json
from rl_core.errors import DataError, DeadlineError, RoleError
from rl_rollout.rewards.calls import current_clock

START_TIMEOUT_S = 120.0


class CheckProcesses:
    """Worker processes that run one module, which serves with `main`.

    Processes start at the first use, and end with this process. After a process accepts the row, a crash or a timeout
    counts against the response, so that no response can make its check fail.
    """

    def __init__(self, module: str, *, timeout_s: float, num_processes: int) -> None:
        """Store the options. Processes start at the first use.

        Args:
            module: Module that each process runs.
            timeout_s: Maximum seconds of one check.
            num_processes: Maximum number of concurrent checks.
        """
        self.workers = [_CheckWorker(module, timeout_s) for _ in range(num_processes)]
        self._idle: queue.SimpleQueue[_CheckWorker] = queue.SimpleQueue()
        for worker in self.workers:
            self._idle.put(worker)

    def check(self, request: Mapping[str, Json]) -> dict[str, Any] | None:
        """Return the verdict on one response; None if the response took too long or ended the process.

        The clock of the call stops until a process is ready.

        Raises:
            DataError: The row is invalid.
            DeadlineError: Reading the row took too long.
            RoleError: The process cannot start, or died before it reached the response.
        """
        clock = current_clock()
        clock.pause()
        worker = self._idle.get()
        try:
            process = worker.started()
            clock.resume()
            return worker.check(process, request)
        finally:
            clock.resume()
            self._idle.put(worker)

    def close(self) -> None:
        """Stop the processes. Can be called twice."""
        for worker in self.workers:
            worker.stop()


class _CheckWorker:
    """One process, started on demand and again after it died. Only one thread uses it at a time."""

    def __init__(self, module: str, timeout_s: float) -> None:
        self._module = module
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], _CheckWorker] | None = None
        self._buffer = b""

    def started(self) -> "subprocess.Popen[bytes]":
        """Return the process, started if it does not run.

        Raises:
            DeadlineError: It did not start in time.
            RoleError: It cannot start.
        """
        return self._process if self._process is not None and self._process.poll() is None else self._start()

    def check(self, process: "subprocess.Popen[bytes]", request: Mapping[str, Json]) -> dict[str, Any] | None:
        """Send a request and wait for its verdict; None if the response took too long or ended the process.

        Raises:
            DataError: The row is invalid.
            DeadlineError: Reading the row took too long.
            RoleError: The process died before it reached the response.
        """
        stdin, replies = cast(IO[bytes], process.stdin), list[dict[str, Any]]()
        try:
            with contextlib.suppress(BrokenPipeError):  # then the process ended, which reading reports
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
            for _ in ("row", "response"):
                reply = self._read_line(process, timeout_s=self._timeout_s + 1.0)
                if "row_error" in reply:
                    raise DataError(reply["row_error"])
                replies.append(reply)
        except (DeadlineError, RoleError):
            self.stop()
            if not replies:
                raise
            return None
        return replies[-1]

    def stop(self) -> None:
        """Kill the process, if there is one."""
        self._buffer = b""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self) -> "subprocess.Popen[bytes]":
        self.stop()
        command = [sys.executable, "-P", "-W", "ignore", "-m", self._module, str(self._timeout_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 (our own module)
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        self._read_line(process, timeout_s=START_TIMEOUT_S)
        return process

    def _read_line(self, process: "subprocess.Popen[bytes]", *, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        stdout = cast(IO[bytes], process.stdout)
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not readable:
                raise DeadlineError(f"a checking process did not answer within {timeout_s:.1f} s.")
            received = os.read(stdout.fileno(), 1 << 16)
            if not received:
                exit_code = process.wait(timeout=10)
                if exit_code == -signal.SIGALRM:
                    raise DeadlineError(f"a check was killed after {timeout_s - 1.0:.1f} s.")
                raise RoleError(f"a checking process ended with exit code {exit_code}; see its stderr.")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(timeout=10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


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
    except DataError as error:  # the check showed that the row is invalid
        verdict = {"row_error": f"{error}"[:500]}
    except Exception as error:
        verdict = {**wrong, "error": f"{type(error).__name__}: {error}"[:300]}
    print_line(answers, verdict)


def print_line(answers: IO[str], value: dict[str, Any]) -> None:
    """Write one JSON line and flush it."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()
