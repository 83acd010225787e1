"""Child processes of a benchmark: programs that run to their end, and peers that answer lines of JSON.

They run offline, and trackers write into their folder. The error of a failed child has its command, its exit status and
the last lines of its output.
"""

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

BENCHMARKS = Path(__file__).resolve().parent
START_TIMEOUT_S = 240.0
QUIT_TIMEOUT_S = 30.0
LAST_LINES = 30
LEFT_OUT = "left out by --quick"
"""Reason for a missing system in a quick report."""
LOCAL = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "offline",
}
WANDB_FOLDERS = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")


class ChildFailedError(RuntimeError):
    """A child did not start, did not answer or ended with an error; the first line of the message says which."""


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment variables, changed so that a child stays offline and writes into the folder."""
    return {**os.environ, **LOCAL, **dict.fromkeys((*WANDB_FOLDERS, "TMPDIR"), str(folder))}


def failure(reason: str, command: Sequence[str], status: int | None, log: Path) -> ChildFailedError:
    """Return the error of a child; `status` is None while it runs."""
    ended = "none yet" if status is None else status
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    told = [reason, f"command: {shlex.join(command)}", f"exit status: {ended}", "last lines of its output:", *lines]
    return ChildFailedError("\n".join(told))


def run_child(command: Sequence[str], log: Path, *, variables: Mapping[str, str] | None = None) -> float:
    """Run a command to its end, with its output in a file.

    Args:
        command: Command to run in the repository's root.
        log: File for the output; its folder also gets temporary files.
        variables: Environment variables beside those of `environment`.

    Returns:
        Duration in seconds.

    Raises:
        ChildFailedError: It ended with an error.
    """
    started = time.perf_counter()
    env = {**environment(log.parent), **(variables or {})}
    with log.open("w") as output:
        process = subprocess.run(
            command, cwd=BENCHMARKS.parent, stdout=output, stderr=subprocess.STDOUT, env=env, check=False
        )
    if process.returncode:
        raise failure(f"{log.stem} failed", command, process.returncode, log)
    return time.perf_counter() - started


class Talker:
    """A process in its own group, whose output lines are read as they arrive.

    Attributes:
        process: The started process.
    """

    def __init__(self, command: Sequence[str], errors: IO[str], *, env: Mapping[str, str], stdin: int) -> None:
        """Start it.

        Args:
            command: Command to run.
            errors: File for its standard error.
            env: All its environment variables.
            stdin: As in `subprocess.Popen`.
        """
        self._lines: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def line(self, timeout_s: float) -> str:
        """Return the next line, or an empty string once the process has closed its output.

        Raises:
            queue.Empty: It wrote no line in time.
        """
        return self._lines.get(timeout=timeout_s)

    def kill(self) -> None:
        """Kill the process and its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(QUIT_TIMEOUT_S)  # a killed process ends, unless it hangs in the kernel

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self._lines.put(line.strip())
        self._lines.put("")


class Peer:
    """The process of a system or side: it prints "ready" once it is warm, then answers each line of JSON with another.

    Attributes:
        name: Name of its log.
        pid: Its process id.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, *, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start it and wait until it is warm.

        Args:
            name: Name of its log.
            command: Its command, an interpreter first; with this process's interpreter, it inherits PYTHONPATH.
            folder: Folder with a short path, for its log and its temporary files.
            variables: Environment variables beside those of `environment`.

        Raises:
            ChildFailedError: It did not get ready.
        """
        self.name = name
        self._command = list(command)
        self._log = folder / f"{name}.log"
        inherited = os.environ.get("PYTHONPATH") if command[0] == sys.executable else None
        paths = os.pathsep.join([str(BENCHMARKS), *filter(None, [inherited])])
        env = {**environment(folder), "PYTHONPATH": paths, **(variables or {})}
        with self._log.open("w") as log:
            self._talker = Talker(self._command, log, env=env, stdin=subprocess.PIPE)
        self._process = self._talker.process
        self.pid = self._process.pid
        try:
            line = self._line(START_TIMEOUT_S, what="start")
            if line != "ready":
                raise self._ended(f"start: {line}")
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        """Return the peer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Send a request and return the answer.

        Raises:
            ChildFailedError: It failed, ended, or did not answer in time.
        """
        stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # its last lines explain why
            if stdin is not None:
                stdin.write(json.dumps(request) + "\n")
                stdin.flush()
        answer = json.loads(self._line(timeout_s, what=str(request["operation"])))
        if isinstance(answer, dict) and "error" in answer:
            raise self._ended(f"{request['operation']}: {answer['error'].splitlines()[0]}")
        return answer

    def stop(self) -> None:
        """Ask it to end, then kill its process group."""
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self._process.communicate('{"operation": "quit"}\n', timeout=QUIT_TIMEOUT_S)
        self._talker.kill()

    def _line(self, timeout_s: float, *, what: str) -> str:
        try:
            line = self._talker.line(timeout_s)
        except queue.Empty:
            reason = f"{what}: no answer within {timeout_s:.0f} s"
            raise failure(reason, self._command, self._process.poll(), self._log) from None
        if not line:
            raise self._ended(f"{what}: it ended without an answer")
        return line

    def _ended(self, reason: str) -> ChildFailedError:
        """Return the error of a peer that has ended or is about to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=QUIT_TIMEOUT_S)
        return failure(reason, self._command, self._process.returncode, self._log)
