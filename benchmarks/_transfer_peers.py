"""The process of each system that benchmarks/transfer.py measures."""

import os
import sys
from pathlib import Path

from _children import BENCHMARKS, ChildFailedError, Peer

SYSTEMS = ("memory", "shm", "ray", "transferqueue", "plain_ray")
VARIABLES = {
    "PYTHONDONTWRITEBYTECODE": "",  # eleven processes that compile torch's files anew start in a minute, else in 20 s
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # without it Ray takes 127.0.0.1 for the host's outer address
    "RAY_worker_niceness": "0",  # Ray's 15 would leave its workers behind whatever else runs
}


def command(system: str) -> list[str]:
    """What starts a system.

    Raises:
        ChildFailedError: Its environment is not there.
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
        folder: For its log and its temporary files, with a short path.

    Raises:
        ChildFailedError: It did not get ready, or its environment is not there.
    """
    return Peer(system, command(system), folder, variables=VARIABLES)
