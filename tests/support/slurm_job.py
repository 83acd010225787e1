"""`python -m slurm_job train SETTINGS.toml ...`: the SLURM script on three loopback addresses, with stand-ins on PATH.

The stand-ins are srun, scontrol, and the trainer with scripted roles. Every process of a node has its address in
SLURMD_NODENAME.
"""

import os
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
HEAD, *WORKERS = HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
ENVIRONMENT = {
    "SLURM_JOB_NODELIST": " ".join(HOSTS),
    "PATH": os.pathsep.join([str(SUPPORT / "slurm"), str(Path(sys.executable).parent), os.environ["PATH"]]),
    "RAY_NODE_OPTIONS": "--num-cpus=2 --object-store-memory=100000000 --include-log-monitor=false",
}
UNSET = ("RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
"""Variables for a Ray that a test starts on one node."""


def node_of(pid: int) -> str:
    """Return the address of a process's node."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(one.partition(b"=")[2].decode() for one in variables if one.startswith(b"SLURMD_NODENAME="))


if __name__ == "__main__":
    environment = {name: value for name, value in os.environ.items() if name not in UNSET} | ENVIRONMENT
    os.chdir(ROOT)
    os.execvpe("bash", ["bash", "examples/launch/slurm.sh", *sys.argv[2:]], environment)
