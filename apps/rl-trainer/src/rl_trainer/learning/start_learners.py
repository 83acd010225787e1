"""What learns in a run, on shared ranks: the policy, and where the algorithm needs them a critic and a reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from rl_core.cluster import ClusterOptions, ResourcePool
from rl_core.cluster.ray.session import RayOptions
from rl_core.cluster.shares import visible_gpus
from rl_core.errors import SettingsError
from rl_distill.checkpoints.pending_save import saved_together
from rl_distill.learner import Critic, Learner, PendingSave, Scorer
from rl_distill.options import LearnerOptions
from rl_trainer.settings.schema import Settings

CRITIC_FOLDER = "critic"


@runtime_checkable
class _TakesHeads(Protocol):
    """A learner that compares whole distributions."""

    def load_teacher_heads(self, folders: Sequence[Path]) -> None:
        """Read the teachers' output matrices."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    """Everything that computes with weights of its own, besides the engine.

    Attributes:
        policy: Is trained.
        reference: Frozen copy of the initial policy, where the KL needs one.
        critic: Says the values, where the advantage needs them.
        close: Ends all of them, and their ranks.
        stacks: What each rank with a process of its own does right now, within so many seconds; for any thread.
    """

    policy: Learner
    reference: Scorer | None
    critic: Critic | None
    close: Callable[[], None]
    stacks: Callable[[float], list[str]] = lambda _: []

    def save(self, folder: Path, *, in_background: bool = False) -> PendingSave:
        """Write everything that trains into an empty folder: the policy in it, the critic in a folder of its own."""
        pending = [self.policy.save(folder, in_background=in_background)]
        if self.critic is not None:
            pending.append(self.critic.save(folder / CRITIC_FOLDER, in_background=in_background))
        return saved_together(*pending)

    def load(self, folder: Path) -> None:
        """Continue from `save`.

        Raises:
            CheckpointError: Missing, torn, or of another model.
        """
        self.policy.load(folder)
        if self.critic is not None:
            self.critic.load(folder / CRITIC_FOLDER)

    def load_teacher_heads(self, folders: Sequence[Path]) -> None:
        """Give the policy the output matrices of teachers, in the order of `teacher_index`.

        Raises:
            SettingsError: The learner cannot take them, or a teacher knows fewer tokens.
        """
        if not isinstance(self.policy, _TakesHeads):
            raise SettingsError(f'distribution = "full" needs a learner that takes teachers; found {self.policy}.')
        self.policy.load_teacher_heads(folders)

    def offload(self) -> None:
        """Free their memory until they are used again."""
        for model in (self.policy, self.reference, self.critic):
            if model is not None:
                model.offload()


def start_learners(settings: Settings, *, log_directory: Path) -> Learners:
    """Start what the settings ask for, with the weights of the initial policy.

    Args:
        settings: The run's.
        log_directory: Where ranks in processes of their own write what they print.

    Raises:
        DataError: A model's folder lacks something.
        DeadlineError: The ranks were not there in time.
        RoleError: A rank died.
        SettingsError: There are too few CPUs or GPUs.
    """
    if settings.policy.learner == "torch":
        return _torch_learners(settings)
    from rl_distill.megatron.learner import MegatronCritic, MegatronLearner, MegatronReference
    from rl_distill.megatron.ranks import LearnerRanks

    where = settings.cluster
    ranks = LearnerRanks(
        settings.parallel,
        cluster=ClusterOptions(kind=where.kind, ray=RayOptions(address=where.ray_address), log_directory=log_directory),
        pool=rank_pool(settings),
        num_threads=settings.learner.num_threads,
        deadline_s=where.start_deadline_s,
        call_deadline_s=where.call_deadline_s,
    )
    try:
        policy = MegatronLearner(settings.policy.path, settings.learner, ranks=ranks)
        reference = critic = None
        if settings.algorithm.kl_coefficient:
            reference = MegatronReference(settings.policy.path, settings.learner, ranks=ranks)
        if needs_critic(settings):
            folder = settings.critic.path or settings.policy.path
            critic = MegatronCritic(folder, critic_options(settings), ranks=ranks)
    except BaseException:
        ranks.close()
        raise
    stacks = {} if where.kind == "inline" else {"stacks": lambda deadline_s: ranks.stacks(deadline_s=deadline_s)}
    return Learners(policy=policy, reference=reference, critic=critic, close=ranks.close, **stacks)


def needs_critic(settings: Settings) -> bool:
    """True when the advantage is made from a critic's values."""
    return settings.algorithm.advantage == "gae"


def critic_options(settings: Settings) -> LearnerOptions:
    """How the critic trains."""
    critic = settings.critic
    return replace(
        settings.learner,
        learning_rate=critic.learning_rate,
        warmup_steps=critic.warmup_steps,
        clip_grad=critic.clip_grad,
        decay_steps=None,
    )


def rank_pool(settings: Settings) -> ResourcePool | None:
    """What is set aside for the ranks; None where they share this machine's CPUs."""
    where, gpus = settings.cluster, gpus_per_rank(settings)
    if not where.cpus_per_rank and not gpus and not visible_gpus():
        return None
    return ResourcePool(name="learner", size=settings.parallel.ranks, cpus=where.cpus_per_rank, gpus=gpus)


def gpus_per_rank(settings: Settings) -> float:
    """GPUs of each rank: as set, else one where this machine has any; 0 in the trainer's own process."""
    if settings.cluster.gpus_per_rank is not None:
        return settings.cluster.gpus_per_rank
    return float(settings.cluster.kind != "inline" and bool(visible_gpus()))


def _torch_learners(settings: Settings) -> Learners:
    from rl_distill.torch_learner import TorchLearner

    models = [TorchLearner(settings.policy.path, settings.learner)]
    if settings.algorithm.kl_coefficient:
        models.append(TorchLearner(settings.policy.path, settings.learner))
    reference = models[1] if len(models) > 1 else None
    return Learners(policy=models[0], reference=reference, critic=None, close=lambda: _close_all(models))


def _close_all(models: Sequence[Learner]) -> None:
    for model in models:
        model.close()
