"""Start the models that learn: the policy, and a critic and a reference if the algorithm needs them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_core.cluster import ClusterOptions, RayOptions, ResourcePool, visible_gpus
from rl_distill import adapter_size
from rl_distill.learners import Learners
from rl_distill.teacher import ScoreTokens
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.settings.schema import Settings


def start_learners(settings: Settings, *, log_directory: Path) -> Learners:
    """Start the learners with the initial policy's weights.

    Args:
        settings: The run's settings.
        log_directory: Where ranks in other processes write their output.

    Raises:
        DataError: A model folder is incomplete.
        DeadlineError: The ranks did not start in time.
        RoleError: A rank died.
        SettingsError: There are too few CPUs or GPUs.
    """
    from rl_distill.megatron.learner import MegatronCritic, MegatronLearner, MegatronReference
    from rl_distill.megatron.ranks import LearnerRanks

    where, ray = settings.cluster, RayOptions(address=settings.cluster.ray_address)
    ranks = LearnerRanks(
        settings.parallel,
        cluster=ClusterOptions(kind=where.placement, ray=ray, log_directory=log_directory),
        pool=rank_pool(settings),
        num_threads=settings.optimizer.num_threads,
        deadline_s=where.start_deadline_s,
        call_deadline_s=where.call_deadline_s,
    )
    learner = replace(settings.optimizer, image_folder=settings.image_folder)
    try:
        taught = settings.distillation
        own, decay = taught.self_teacher.model, taught.self_teacher.average_decay
        where_built: Any = {"ranks": ranks, "backend": settings.policy.backend}
        kept: Any = {"lora": settings.lora, "average_decay": decay if own == "average" else 0.0}
        wanted: Any = {"top_k": taught.num_top, "temperature": taught.temperature, "has_hidden": taught.needs_hidden}
        policy = MegatronLearner(settings.policy.path, learner, **where_built, **kept)
        self_teacher: ScoreTokens | None = None if own is None else partial(policy.score, weights=own, **wanted)
        reference: Any = None
        critic = None
        if settings.lora.rank and needs_reference(settings):
            reference = policy.reference()  # the policy's own base, without its adapter
        elif needs_reference(settings):
            reference = MegatronReference(settings.policy.path, learner, **where_built)
            if own == "reference":
                self_teacher = partial(reference.score, **wanted)
                policy.load_teacher_heads([settings.policy.path] if taught.needs_hidden else [])
        if needs_critic(settings):
            chosen = settings.critic
            rates = {name: getattr(chosen, name) for name in ("learning_rate", "warmup_steps", "clip_grad")}
            options = replace(learner, decay_steps=None, **rates)
            critic = MegatronCritic(chosen.path or settings.policy.path, options, **where_built)
    except BaseException:
        ranks.close()
        raise

    def stacks(deadline_s: float) -> list[str]:
        return [] if where.placement == "inline" else ranks.stacks(deadline_s=deadline_s)

    return Learners(
        policy=policy,
        reference=reference,
        critic=critic,
        close=ranks.close,
        stacks=stacks,
        check_alive=ranks.check_alive,
        gpu_use=ranks.gpu_use,
        lora=settings.lora,
        self_teacher=self_teacher,
    )


def describe_parameters(settings: Settings, num_parameters: int) -> str:
    """The policy's parameters, trained parameters and ranks, in words."""
    trained = ""
    if settings.lora.rank:
        size = adapter_size(model_config(settings.policy.path, settings.policy.backend), settings.lora)
        trained = f", trains {size:,} of an adapter"
    ranks = f" on {settings.parallel.ranks} ranks" if settings.parallel.ranks > 1 else ""
    return f"{num_parameters:,} parameters{trained}{ranks}"


def needs_reference(settings: Settings) -> bool:
    """True when the initial policy scores tokens, for a KL term or as the teacher."""
    return settings.algorithm.kl_coefficient > 0 or settings.distillation.self_teacher.model == "reference"


def needs_critic(settings: Settings) -> bool:
    """True when the advantage uses a critic's values."""
    return settings.algorithm.advantage == "gae"


def rank_pool(settings: Settings) -> ResourcePool | None:
    """Resources reserved for the ranks; None when they share this machine's CPUs."""
    where, gpus = settings.cluster, gpus_per_rank(settings)
    if not where.cpus_per_rank and not gpus and not visible_gpus():
        return None
    return ResourcePool(name="learner", size=settings.parallel.ranks, cpus=where.cpus_per_rank, gpus=gpus)


def gpus_per_rank(settings: Settings) -> float:
    """GPUs per rank: as set, else one if this machine has GPUs; 0 for an inline rank."""
    if settings.cluster.gpus_per_rank is not None:
        return settings.cluster.gpus_per_rank
    return float(settings.cluster.placement != "inline" and bool(visible_gpus()))
