"""Processes that a benchmark starts: those that run to their end, and peers, which answer lines of JSON.

They need no account and no variable: they keep to this machine, and trackers write into their folder. The error of one
that fails has its command, its exit status and the last lines of its output.
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
"""Why a quick report has no row of a system."""
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
    """This process's environment variables and those that keep a child to this machine and to the folder."""
    return {**os.environ, **LOCAL, **dict.fromkeys((*WANDB_FOLDERS, "TMPDIR"), str(folder))}


def failure(reason: str, command: Sequence[str], status: int | None, log: Path) -> ChildFailedError:
    """The error of a child; its status is None while it runs."""
    ended = "none yet" if status is None else status
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    told = [reason, f"command: {shlex.join(command)}", f"exit status: {ended}", "last lines of its output:", *lines]
    return ChildFailedError("\n".join(told))


def run_child(command: Sequence[str], log: Path, *, variables: Mapping[str, str] | None = None) -> float:
    """Run to the end, with the output in a file.

    Args:
        command: What to run, in the repository's root.
        log: For the output; its folder takes temporary files too.
        variables: Environment variables beside those of `environment`.

    Returns:
        Seconds that it took.

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
    """A process in a group of its own, whose lines are read as they come.

    Attributes:
        process: What was started.
    """

    def __init__(self, command: Sequence[str], errors: IO[str], *, env: Mapping[str, str], stdin: int) -> None:
        """Start it.

        Args:
            command: What to run.
            errors: The file for its standard error.
            env: All of its environment variables.
            stdin: As subprocess takes it.
        """
        self._lines: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def line(self, timeout_s: float) -> str:
        """The next line, or an empty string once the process has closed its output.

        Raises:
            queue.Empty: It wrote none in time.
        """
        return self._lines.get(timeout=timeout_s)

    def kill(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self._lines.put(line.strip())
        self._lines.put("")


class Peer:
    """A started process of a system or side; says "ready" once it is warm, then answers a line of JSON with another.

    Attributes:
        name: Of its log.
        pid: Of its process.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, *, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start it and wait until it is warm.

        Args:
            name: Of its log.
            command: What starts it, an interpreter first; with this one it finds all modules that this process finds.
            folder: For its log and its temporary files, with a short path.
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
        """Give itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The answer to a request.

        Raises:
            ChildFailedError: It failed, ended, or took longer.
        """
        stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # its last lines say more
            if stdin is not None:
                stdin.write(json.dumps(request) + "\n")
                stdin.flush()
        answer = json.loads(self._line(timeout_s, what=str(request["operation"])))
        if isinstance(answer, dict) and "error" in answer:
            raise self._ended(f"{request['operation']}: {answer['error'].splitlines()[0]}")
        return answer

    def stop(self) -> None:
        """Ask it to end, and end what is left of it."""
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
        """The error of one that has ended or is about to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=QUIT_TIMEOUT_S)
        return failure(reason, self._command, self._process.returncode, self._log)
