"""A process that a benchmark starts and asks: lines of JSON, one answer to each request."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 240.0
QUIT_TIMEOUT_S = 30.0


class PeerFailedError(RuntimeError):
    """A system did not start, or did not answer; the message has its last words."""


class Peer:
    """A started process of a system or side; says "ready" once it is warm, then answers a line of JSON with another."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, *, variables: Mapping[str, str]) -> None:
        """Start it and wait until it is warm.

        Args:
            name: Of its log.
            command: What starts it.
            folder: For its log and its temporary files, with a short path.
            variables: Environment variables beside this process's own.

        Raises:
            PeerFailedError: It did not get ready.
        """
        self._log = folder / f"{name}.log"
        self._lines: queue.Queue[str] = queue.Queue()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **variables, "TMPDIR": str(folder)},
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._ready()
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
            PeerFailedError: It failed, ended, or took longer.
        """
        stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # its last words say more
            if stdin is not None:
                stdin.write(json.dumps(request) + "\n")
                stdin.flush()
        answer = json.loads(self._line(timeout_s, what=str(request["operation"])))
        if isinstance(answer, dict) and "error" in answer:
            raise PeerFailedError(f"{request['operation']}: {answer['error'].splitlines()[0]}")
        return answer

    def stop(self) -> None:
        """Ask it to end, and end what is left of it."""
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self._process.communicate('{"operation": "quit"}\n', timeout=QUIT_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ready(self) -> None:
        line = self._line(START_TIMEOUT_S, what="start")
        if line != "ready":
            raise PeerFailedError(f"start: {json.loads(line).get('error', line)}")

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line.strip())
        self._lines.put("")

    def _line(self, timeout_s: float, *, what: str) -> str:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerFailedError(f"{what}: no answer within {timeout_s:.0f} s. {self._last_words()}") from None
        if not line:
            status = self._process.wait(timeout=QUIT_TIMEOUT_S)
            raise PeerFailedError(f"{what}: it ended with status {status}. {self._last_words()}")
        return line

    def _last_words(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").splitlines()[-3:])
