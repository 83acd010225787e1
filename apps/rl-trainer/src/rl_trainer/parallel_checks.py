"""What can be refused of `[parallel]`, `[cluster]` and `[replicas]` before anything heavy starts."""

from collections.abc import Iterator

from rl_core.errors import SettingsError
from rl_distill.parallel_layout import check_ranks
from rl_trainer.settings import Settings


def parallel_problems(settings: Settings) -> Iterator[str]:
    """Layouts that no policy could have, ranks and engines with nowhere to run."""
    parallel, cluster = settings.parallel, settings.cluster
    try:
        check_ranks(parallel)
    except SettingsError as error:
        yield f"parallel: {error}"
    if parallel.ranks > 1 and settings.policy.learner != "megatron":
        yield (
            f'parallel.ranks = {parallel.ranks} needs policy.learner = "megatron"; found {settings.policy.learner!r}.'
        )
    if parallel.ranks > 1 and cluster.kind == "inline":
        yield (
            f'parallel.ranks = {parallel.ranks} needs processes of their own: set cluster.kind to "process" or '
            '"ray"; found "inline".'
        )
    placements = settings.placements
    if cluster.ray_address is not None and "ray" not in placements.values():
        on_ray = " or ".join(f'{name} = "ray"' for name in placements)
        yield f"cluster.ray_address is for {on_ray}; found {', '.join(map(repr, placements.values()))}."
    if cluster.ray_address is not None and cluster.kind == "ray" and cluster.gpus_per_rank is None:
        yield (
            "cluster.gpus_per_rank must be set where a Ray cluster is joined, whose GPUs this machine does not show: 1 "
            "for a GPU each, 0 to train on CPUs; found none."
        )
    if cluster.kind == "inline" and (cluster.cpus_per_rank or cluster.gpus_per_rank):
        yield (
            "cluster.cpus_per_rank and cluster.gpus_per_rank set nothing aside for a rank in the trainer's process; "
            'set them to 0, or cluster.kind to "process" or "ray".'
        )
    yield from _replica_problems(settings)


def _replica_problems(settings: Settings) -> Iterator[str]:
    replicas, placement = settings.replicas, settings.rollout.placement
    if placement == "inline" and (replicas.count > 1 or replicas.cpus or replicas.gpus):
        yield (
            f"replicas.count = {replicas.count}, replicas.cpus and replicas.gpus need engines in processes of their "
            'own: set rollout.placement to "process" or "ray"; found "inline".'
        )
    if settings.weights.transport != "file" and (placement == "inline" or settings.rollout.engine != "vllm"):
        yield (
            f'weights.transport = "{settings.weights.transport}" is for vLLM in processes of its own: set '
            f'rollout.placement to "process" or "ray", or the transport to "file"; found placement {placement!r} and '
            f"engine {settings.rollout.engine!r}."
        )
    if placement == "ray" and settings.cluster.ray_address is not None and replicas.gpus is None:
        yield (
            "replicas.gpus must be set where a Ray cluster is joined, whose GPUs this machine does not show: 1 for a "
            "GPU each, 0 to generate on CPUs; found none."
        )
