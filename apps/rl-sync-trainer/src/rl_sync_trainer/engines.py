"""Settings become an engine, in this process or in processes of its own."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rl_core.cluster import ClusterOptions, ResourcePool
from rl_core.cluster.shares import visible_gpus
from rl_core.ray_session import RayOptions
from rl_rollout.engines.options import TransformersOptions, VLLMOptions
from rl_rollout.engines.protocol import RolloutEngine
from rl_rollout.engines.registry import engine_class
from rl_sync_trainer.settings import Settings


def make_engine(settings: Settings, policy: Path, *, log_directory: Path | None = None) -> RolloutEngine:
    """The engine of the settings on a Hugging Face folder; its `start` loads it.

    Args:
        settings: The run's.
        policy: The folder.
        log_directory: Where engines in processes of their own write what they print.
    """
    name, options = settings.rollout.engine, engine_options(settings)
    placement = settings.rollout.placement
    if placement == "inline":
        engine: RolloutEngine = engine_class(name)(policy, options)
        return engine
    from rl_rollout.engines.process import EngineHost, ProcessEngine
    from rl_rollout.engines.replicas import ReplicatedEngine

    host = EngineHost(
        cluster=ClusterOptions(
            kind=placement, ray=RayOptions(address=settings.cluster.ray_address), log_directory=log_directory
        ),
        pool=replica_pool(settings),
        max_restarts=settings.replicas.restarts,
        deadline_s=settings.rollout.start_deadline_s,
    )
    count = settings.replicas.count
    return ReplicatedEngine([ProcessEngine(name, policy, options, host=host, index=index) for index in range(count)])


def replica_pool(settings: Settings) -> ResourcePool | None:
    """What is set aside for the replicas; None where they share what this machine has."""
    gpus = gpus_per_replica(settings)
    if not settings.replicas.cpus and not gpus:
        return None
    return ResourcePool(name="engine", size=settings.replicas.count, cpus=settings.replicas.cpus, gpus=gpus)


def gpus_per_replica(settings: Settings) -> float:
    """GPUs of each replica: as set, else what one needs where this machine has GPUs that several must share out."""
    replicas, placement = settings.replicas, settings.rollout.placement
    if replicas.gpus is not None:
        return replicas.gpus
    has_choice = placement == "ray" or (placement == "process" and replicas.count > 1)
    return 1.0 if has_choice and visible_gpus() else 0.0


def engine_options(settings: Settings) -> Any:
    """The options of the engine that is named, with the context that this run needs."""
    longest = settings.prompts.max_tokens + settings.rollout.max_response_tokens
    options = replace(
        settings.engine,
        max_model_len=settings.engine.max_model_len or longest,
        can_sleep=settings.engine.can_sleep or settings.rollout.sleep,
    )
    if settings.rollout.engine != "transformers":
        return options
    shared = {field.name for field in fields(TransformersOptions)} & {field.name for field in fields(VLLMOptions)}
    return TransformersOptions(**{name: getattr(options, name) for name in shared})
