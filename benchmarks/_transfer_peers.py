"""The process of each system that benchmarks/transfer.py measures."""

import os
import sys
from pathlib import Path

from _children import BENCHMARKS, ChildFailedError, Peer

SYSTEMS = ("memory", "shm", "ray", "transferqueue", "plain_ray")
VARIABLES = {
    "PYTHONDONTWRITEBYTECODE": "",  # without bytecode, eleven processes start in a minute instead of 20 s
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise Ray replaces 127.0.0.1 by the host's external address
    "RAY_worker_niceness": "0",  # Ray's default, 15, would let other programs starve its workers
}


def command(system: str) -> list[str]:
    """Return the command of a system.

    Raises:
        ChildFailedError: Its environment does not exist.
    """
    peers = BENCHMARKS / "peers"
    if system == "transferqueue":
        python = os.environ.get("TRANSFERQUEUE_PYTHON", "")
        if not Path(python).is_file():
            raise ChildFailedError(
                f"TRANSFERQUEUE_PYTHON must name the python of an environment with TransferQueue; found {python!r}."
            )
        return [python, str(peers / "transferqueue_peer.py")]
    if system == "plain_ray":
        return [sys.executable, str(peers / "plain_ray.py")]
    return [sys.executable, str(peers / "our_queue.py"), "--backend", system]


def start(system: str, folder: Path) -> Peer:
    """Start a system and wait until it is warm.

    Args:
        system: One of `SYSTEMS`.
        folder: Folder with a short path, for its log and temporary files.

    Raises:
        ChildFailedError: It did not get ready, or its environment does not exist.
    """
    return Peer(system, command(system), folder, variables=VARIABLES)
