"""Start, kill and read the processes of `skip_worker`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rl_core.testing import wait_until

WORKER = Path(__file__).with_name("skip_worker.py")
DEADLINE_S = 120.0


class Worker:
    """One process and its output."""

    def __init__(self, owner: "Workers", pid: int, said: Path) -> None:
        self._owner = owner
        self.pid = pid
        self._said = said
        self.is_over = False

    @property
    def lines(self) -> list[str]:
        return self._said.read_text().splitlines() if self._said.exists() else []

    def wait_for(self, word: str) -> None:
        wait_until(lambda: any(line.startswith(word) for line in self.lines), f"{word!r}", deadline_s=DEADLINE_S)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for its end; return its exit status, or the negative number of the signal that ended it."""
        status = int(self._owner.ask(f"wait {self.pid}"))
        self.is_over = True
        return status

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, self.lines

    def result(self) -> list[str]:
        """Return its output between "ready" and "done", once it is done."""
        assert self.wait() == 0
        assert self.lines[-1] == "done", self.lines[-1]
        return self.lines[1:-1]


class Workers:
    """A process with all imports done, which forks workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers: list[Worker] = []
        path = os.pathsep.join(part for part in sys.path if part)
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def start(self, role: str, root: Path, *, compress: bool = True, **arguments: Any) -> Worker:
        said = self._folder / f"said-{len(self._workers)}"
        asked = {"role": role, "root": str(root), "said": str(said), "compress": compress, **arguments}
        worker = Worker(self, int(self.ask(json.dumps(asked))), said)
        self._workers.append(worker)
        return worker

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        for worker in self._workers:
            if not worker.is_over:
                worker.send(signal.SIGKILL)
                worker.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._process.stdout.close()
