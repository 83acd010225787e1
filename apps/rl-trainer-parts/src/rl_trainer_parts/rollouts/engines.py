"""Build the engine from the settings, in this process or in others."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rl_core.cluster import ClusterOptions, RayOptions, ResourcePool, visible_gpus, within
from rl_distill import adapted_modules
from rl_rollout.engines import (
    EnginePlacement,
    ProcessEngine,
    ReplicatedEngine,
    RolloutEngine,
    TransformersOptions,
    VLLMOptions,
    engine_class,
)
from rl_trainer_parts.learning.engine_choice import engine_name
from rl_trainer_parts.learning.mixtures import learner_name, model_config
from rl_trainer_parts.settings.schema import Settings


def make_engine(
    settings: Settings, policy: Path, *, log_directory: Path | None = None, serves_adapter: bool = True
) -> ReplicatedEngine:
    """The engines for a Hugging Face folder; `start` loads the model.

    Args:
        settings: The run's settings.
        policy: Hugging Face folder.
        log_directory: Where engines in other processes write their output.
        serves_adapter: See `engine_options`.
    """
    options = engine_options(settings, serves_adapter=serves_adapter)
    if settings.rollout.placement == "inline":
        return ReplicatedEngine([engine_class(engine_name(settings))(policy, options)])
    pool = replica_pool(settings)
    return ReplicatedEngine(
        [
            make_replica(settings, policy, index=index, pool=pool, log_directory=log_directory, options=options)
            for index in range(settings.replicas.count)
        ]
    )


async def start_within(engine: RolloutEngine, settings: Settings) -> None:
    """Start an engine within `rollout.start_deadline_s`.

    Raises:
        DeadlineError: The start took longer.
        EngineError: The engine cannot start.
    """
    deadline_s = settings.rollout.start_deadline_s
    what = f"the {engine_name(settings)} engine to start (rollout.start_deadline_s)"
    async with within(deadline_s, f"waited {deadline_s:g} s for {what} and gave up."):
        await engine.start()


def make_replica(
    settings: Settings,
    policy: Path,
    *,
    index: int,
    pool: ResourcePool | None,
    log_directory: Path | None = None,
    options: Any = None,
) -> RolloutEngine:
    """An engine in its own process, not started.

    Args:
        settings: The run's settings, with engines outside the trainer's process.
        policy: Hugging Face folder.
        index: Index of the replica.
        pool: Resources it may use.
        log_directory: Where it writes its output.
        options: The engine's options; None uses `engine_options`.
    """
    ray = RayOptions(address=settings.cluster.ray_address)
    host = EnginePlacement(
        cluster=ClusterOptions(kind=settings.rollout.placement, ray=ray, log_directory=log_directory),
        pool=pool,
        max_restarts=settings.replicas.restarts,
        deadline_s=settings.rollout.start_deadline_s,
    )
    chosen = engine_options(settings) if options is None else options
    return ProcessEngine(engine_name(settings), policy, chosen, host=host, index=index)


def replica_pool(settings: Settings) -> ResourcePool | None:
    """Resources reserved for the replicas; None when they share this machine."""
    gpus = gpus_per_replica(settings)
    if not settings.replicas.cpus and not gpus:
        return None
    return ResourcePool(name="engine", size=settings.replicas.count, cpus=settings.replicas.cpus, gpus=gpus)


def gpus_per_replica(settings: Settings) -> float:
    """GPUs per replica: as set, else as many as one needs if several replicas share this machine's GPUs."""
    replicas, placement = settings.replicas, settings.rollout.placement
    if replicas.gpus is not None:
        return replicas.gpus
    has_choice = placement == "ray" or (placement == "process" and replicas.count > 1)
    return float(settings.vllm.tensor_parallel_size) if has_choice and visible_gpus() else 0.0


def longest_trajectory(settings: Settings) -> int:
    """Maximum trajectory length. `rollout.max_response_tokens` limits one turn; the engine limits the rest."""
    longest = settings.prompts.max_tokens + settings.rollout.max_response_tokens
    return max(longest, settings.vllm.max_model_len or 0) if settings.rollout.loop == "agent" else longest


def engine_options(settings: Settings, *, serves_adapter: bool = True) -> Any:
    """The engine's options, with the context length that this run needs.

    Args:
        settings: The run's settings.
        serves_adapter: The engine receives the adapter of `[lora]` if adapters are served. False for an engine that
            always receives merged weights.
    """
    longest = settings.prompts.max_tokens + settings.rollout.max_response_tokens
    options = replace(
        settings.vllm,
        max_model_len=settings.vllm.max_model_len or longest,
        image_folder=settings.image_folder,
        can_sleep=settings.vllm.can_sleep or settings.rollout.offload_engine,
        capture_experts=settings.vllm.capture_experts and learner_name(settings) == "megatron",
        **(_room_for_adapter(settings) if serves_adapter else {}),
    )
    if engine_name(settings) != "transformers":
        return options
    shared = {field.name for field in fields(TransformersOptions)} & {field.name for field in fields(VLLMOptions)}
    return TransformersOptions(**{name: getattr(options, name) for name in shared})


def _room_for_adapter(settings: Settings) -> dict[str, Any]:
    """Options of an engine that receives the adapter of `[lora]`; empty if it receives all weights."""
    lora = settings.lora
    if not lora.rank or lora.serving != "adapter":
        return {}
    adapted = adapted_modules(model_config(settings.policy.path, settings.policy.backend), lora)
    modules = {name.rpartition(".")[2] for name in adapted}
    return {"max_lora_rank": lora.rank, "lora_target_modules": tuple(sorted(modules))}
