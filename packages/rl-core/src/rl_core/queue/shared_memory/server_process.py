"""The process of a shared-memory queue's server: `python -m rl_core.queue.shared_memory.server_process FD`."""

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import JournalError, RLError
from rl_core.queue.interface import QueueOptions, TaskSpec
from rl_core.queue.shared_memory.server import QueueServer

NICENESS = -10


def main() -> None:
    """Run a queue server: `python -m rl_core.queue.shared_memory.server_process FD`; FD provides its configuration."""
    with socket.socket(fileno=int(sys.argv[1])) as owner:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
        with owner.makefile("rb") as stream:
            line = stream.readline()
        folder, tasks, options = msgspec.json.decode(line, type=tuple[str, list[TaskSpec], dict[str, Any]])
        try:
            if options["directory"] is not None:
                options["directory"] = Path(options["directory"])
            server = QueueServer(Path(folder), tasks, QueueOptions(**options))
        except (RLError, OSError) as error:
            kind = type(error).__name__ if isinstance(error, RLError) else JournalError.__name__
            owner.sendall(msgspec.json.encode([kind, str(error)]) + b"\n")
            sys.exit(1)
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        with contextlib.suppress(OSError):  # all clients wait for this process; only root may raise priority
            os.nice(NICENESS)
        owner.sendall(msgspec.json.encode(["ready", os.getpid()]) + b"\n")
        server.serve(owner=owner)


if __name__ == "__main__":
    main()
