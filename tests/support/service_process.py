"""`rl-service serve` as a process that tests kill, and what its clients need."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "Qwen/Qwen3-8B"
DEADLINE_S = 120.0


class ServiceProcess:
    """A service on one port, which can be killed and started again."""

    def __init__(self, folder: Path, **settings: object) -> None:
        """Serve the policy in a folder.

        Args:
            folder: Has `policy`; gets the service's files.
            **settings: Settings by name, with __ for a dot.
        """
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._port = listening.getsockname()[1]
        self.folder, self.output = folder, folder / "service.log"
        words = [f"--policy={folder / 'policy'}", f'--policy.names=["{NAME}"]', f"--server.folder={folder / 'runs'}"]
        words += [f"--server.port={self._port}", "--learner.num_threads=1", "--engine.name=transformers"]
        self._words = words + [f"--{name.replace('__', '.')}={value}" for name, value in settings.items()]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it, and wait until it serves."""
        started = len(self.said("Serving "))
        command = [sys.executable, "-m", "rl_service.main", "serve", *self._words]
        with self.output.open("a") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        until(lambda: len(self.said("Serving ")) > started or not self.is_running)
        assert self.is_running, self.output.read_text()

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait until it has ended, and return its status."""
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def said(self, begin: str) -> list[str]:
        """Return the lines of its output that begin so."""
        lines = self.output.read_text().splitlines() if self.output.exists() else []
        return [one for one in lines if one.startswith(begin)]

    def environment(self) -> dict[str, str]:
        """Return the variables of its clients."""
        key = (self.folder / "runs" / "key").read_text().strip()
        return {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}

    def client(self) -> Any:
        """Return a client with a session of its own."""
        import tinker

        found = self.environment()
        return tinker.ServiceClient(base_url=found["TINKER_BASE_URL"], api_key=found["TINKER_API_KEY"])


def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(state[1]) == pid and state[0] != "Z":
            found.append(int(file.parent.name))
    return sorted(found)
