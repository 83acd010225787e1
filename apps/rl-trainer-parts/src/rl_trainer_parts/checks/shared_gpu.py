"""Checks of settings for an engine and a learner that share a GPU."""

from collections.abc import Iterator

from rl_trainer_parts.settings.schema import Settings


def shared_gpu_problems(settings: Settings) -> Iterator[str]:
    """Problems of `weights.transport = "ipc"` and `rollout.offload_keeps_weights`."""
    if settings.weights.transport == "ipc":
        yield from _shared_memory(settings)
    if not settings.rollout.offload_keeps_weights and settings.lora.rank and settings.lora.serving == "adapter":
        yield (
            "rollout.offload_keeps_weights = false drops the engine's weights, and an adapter update does not restore "
            'the base weights. Set it to true, or lora.serving to "merged".'
        )


def _shared_memory(settings: Settings) -> Iterator[str]:
    wanted = 'weights.transport = "ipc" needs one engine in its own process and a single-rank learner on the same GPU'
    other = 'or use weights.transport = "file"'
    if settings.rollout.placement != "process" or settings.replicas.count > 1:
        yield (
            f'{wanted}: set rollout.placement to "process" and replicas.count to 1, {other}; found '
            f"{settings.rollout.placement!r} and {settings.replicas.count}."
        )
    if settings.vllm.tensor_parallel_size > 1:
        yield f"{wanted}: set vllm.tensor_parallel_size to 1, {other}; found {settings.vllm.tensor_parallel_size}."
    if settings.parallel.ranks > 1 or settings.cluster.placement != "inline":
        yield (
            f'{wanted}: set cluster.placement to "inline" and parallel.ranks to 1, {other}; found '
            f"{settings.cluster.placement!r} and {settings.parallel.ranks}."
        )
