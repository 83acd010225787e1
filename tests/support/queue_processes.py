"""Processes of `queue_worker.py`, and their output."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from rl_core.testing import wait_until

WORKER = Path(__file__).with_name("queue_worker.py")
DEADLINE_S = 60.0


class Worker:
    """A process that reports its actions line by line."""

    def __init__(self, role: str, address: str) -> None:
        self.role = role
        self.lines: list[str] = []

        command = [sys.executable, str(WORKER), role, address]
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def wait_for(self, word: str) -> str:
        wait_until(lambda: any(line.startswith(word) for line in self.lines), f"{word!r}", deadline_s=DEADLINE_S)
        return next(line for line in self.lines if line.startswith(word))

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        self.process.wait(DEADLINE_S)
        self.thread.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
