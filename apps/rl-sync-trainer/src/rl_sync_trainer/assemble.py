"""Settings become objects: learner, engine, queue, transport, loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rl_core import Batch, Canary, InProcessQueue, Lease, Prompt, Ragged, RowKey, TaskSpec, TransferQueue
from rl_core.broadcast import BroadcastTransport
from rl_core.publish import BFLOAT16_TOLERANCES, ProofTolerances
from rl_core.transports import SharedFileTransport, TensorTransport
from rl_core.weights import WeightTransport
from rl_distill.objectives.batch_columns import SampledLogprobs, component_columns
from rl_distill.objectives.distillation import DistillationObjective, distillation_objective
from rl_distill.objectives.kl_control import AdaptiveKL
from rl_distill.objectives.policy_objective import (
    PolicyObjective,
    PolicyObjectiveOptions,
    bound_policy_loss,
    policy_objective,
)
from rl_distill.objectives.selection import TokenSelection
from rl_distill.skipping import SkippedUpdates
from rl_distill.teacher.service import TeacherService, teacher_task
from rl_metrics.reduction import Recorder
from rl_rollout.audit import AuditOptions
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams
from rl_rollout.loops import resolve_loop
from rl_rollout.prompts import PromptSource
from rl_rollout.rollout import Rollout, RolloutOptions
from rl_sync_trainer.checkpoints import TrainerState
from rl_sync_trainer.distilling import has_teachers, objective_options
from rl_sync_trainer.inputs import Inputs, make_scorer
from rl_sync_trainer.learners import Learners, needs_critic
from rl_sync_trainer.replay import Replay
from rl_sync_trainer.run_folder import RunFolder
from rl_sync_trainer.settings import Settings
from rl_sync_trainer.stopping import StopSignal

REFERENCE = "reference"
OLD_LOGPROBS = "old_logprobs"
VALUES = "values"
TRAIN = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that the loop works with.

    Attributes:
        settings: As the user set them.
        inputs: Tokenizer, prompts, reward.
        folder: The run's folder.
        learners: Policy, reference and critic.
        engine: Generates; started.
        rollout: Runs the agent loop on the engine.
        replay: Gives stored rollouts in place of new ones, where the settings say so.
        source: Order of the training prompts.
        queue: Between rollouts and learner.
        teachers: Score what is in the queue, where there are any; started.
        transport: Brings weights to the engine.
        objective: What the learner minimises.
        kl: The KL's coefficient at the start of the run, and how it goes on.
        select_tokens: Chooses the tokens that the policy loss treats apart, where it does.
        skipped: Counts updates that were not finite.
        stop: Ctrl-C and SIGTERM.
        on_state: Told each state that the run could go on from.
        say: Writes an event, with its name and fields.
        log_metrics: Takes the metrics of a step.
        save_checkpoint: Writes a checkpoint.
    """

    settings: Settings
    inputs: Inputs
    folder: RunFolder
    learners: Learners
    engine: RolloutEngine
    rollout: Rollout
    replay: Replay
    source: PromptSource
    queue: TransferQueue
    teachers: TeacherService | None
    transport: WeightTransport
    objective: PolicyObjective | DistillationObjective
    kl: AdaptiveKL
    select_tokens: TokenSelection | None
    skipped: SkippedUpdates
    stop: StopSignal
    on_state: Callable[[TrainerState], None]
    say: Callable[..., None]
    log_metrics: Callable[[int, Mapping[str, float]], None]
    save_checkpoint: Callable[[TrainerState], None]

    @property
    def sampling(self) -> SamplingParams:
        """How training samples are drawn; `Rollout.run` gives each prompt its seed."""
        rollout = self.settings.rollout
        return SamplingParams(
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )

    @property
    def recomputes_old_logprobs(self) -> bool:
        """True when the learner scores a batch before it trains on it."""
        return self.settings.algorithm.old_logprobs == "recompute"

    @property
    def sampled_logprobs(self) -> SampledLogprobs:
        """Column of the logprobs of the policy that sampled, as the update knows them."""
        return sampled_logprobs(self.settings)

    def objective_at(self, kl_coefficient: float) -> PolicyObjective | DistillationObjective:
        """The objective with the present coefficient of the KL, where that is in the loss."""
        if self.settings.algorithm.kl_in != "loss":
            return self.objective
        if isinstance(self.objective, PolicyObjective):
            return self.objective.with_kl_coefficient(kl_coefficient)
        policy = self.objective.policy
        return replace(self.objective, policy=policy and policy.with_kl_coefficient(kl_coefficient))

    async def issue(self, prompts: Sequence[Prompt], *, num_sessions: int) -> None:
        """Issue prompts, and tell the teachers, who may wait for some."""
        self.queue.issue(prompts, num_sessions=num_sessions)
        if self.teachers is not None:
            await self.teachers.issued()

    @property
    def tolerances(self) -> ProofTolerances:
        """How far the engine may be from the learner."""
        is_exact = self.settings.engine.dtype == self.settings.learner.dtype == "float32"
        default = ProofTolerances() if is_exact else BFLOAT16_TOLERANCES
        canary = self.settings.trainer.proof_tolerance
        return ProofTolerances(probe=default.probe, canary=default.canary if canary is None else canary)

    def lease(self, task: str, num_groups: int) -> Lease:
        """Lease groups of this step."""
        return self.queue.lease(task, groups=num_groups, deadline_s=self.settings.rollout.deadline_s)

    def canary(self) -> Canary:
        """Fixed sequences with the learner's logprobs of the current weights."""
        train = self.inputs.train
        count = min(self.settings.trainer.canary_prompts, len(train))
        sequences = [train[index].input_ids for index in range(count)]
        keys = [RowKey(f"canary-{index}", 0, 0) for index in range(count)]
        logprobs = self.learners.policy.logprobs(Batch(keys, {"input_ids": Ragged.from_rows(sequences, dtype="int32")}))
        return Canary(sequences=sequences, logprobs=list(logprobs))

    def record(self, recorder: Recorder, values: Mapping[str, float]) -> None:
        """Record several values."""
        for name, value in values.items():
            recorder.record(name, value)


def make_objective(settings: Settings) -> PolicyObjective | DistillationObjective:
    """What the learner minimises: the policy's objective, that of teachers, or both.

    Raises:
        SettingsError: An option is unknown or impossible.
    """
    if not settings.distillation.is_on or settings.distillation.used_as == "reward":
        return make_policy_objective(settings)
    policy = make_policy_objective(settings) if settings.distillation.use_task_rewards else None
    return distillation_objective(objective_options(settings), policy)


def make_policy_objective(settings: Settings) -> PolicyObjective:
    """The policy objective of the settings.

    Raises:
        SettingsError: An option is unknown or impossible.
    """
    algorithm = settings.algorithm
    return policy_objective(
        PolicyObjectiveOptions(
            old_logprobs=sampled_logprobs(settings),
            policy_loss=algorithm.policy_loss,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            policy_loss_options=algorithm.policy_loss_options,
            kl_coefficient=algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0,
            kl_estimator=algorithm.kl_estimator,
            entropy_coefficient=algorithm.entropy_coefficient,
        )
    )


def make_selection(settings: Settings) -> TokenSelection | None:
    """What chooses the tokens that the policy loss treats apart; None where it treats all alike."""
    return bound_policy_loss(make_policy_objective(settings).options).select


def sampled_logprobs(settings: Settings) -> SampledLogprobs:
    """Column of the ratio's denominator."""
    return "old_logprobs" if settings.algorithm.old_logprobs == "recompute" else "rollout_logprobs"


def make_kl_control(settings: Settings) -> AdaptiveKL:
    """The KL's coefficient at the start of a run.

    Raises:
        SettingsError: The target or the horizon is impossible.
    """
    algorithm = settings.algorithm
    return AdaptiveKL(coefficient=algorithm.kl_coefficient, target=algorithm.kl_target, horizon=algorithm.kl_horizon)


def gdpo_components(settings: Settings) -> list[str]:
    """Components of the reward that travel with the rows, because the advantage compares them."""
    weights = settings.algorithm.advantage_options.get("weights")
    return sorted(weights) if settings.algorithm.advantage == "gdpo" and isinstance(weights, dict) else []


def make_queue(settings: Settings) -> TransferQueue:
    """The queue with the tasks of this run, which get the groups as they were issued: so runs can be repeated."""
    rollout_columns = frozenset({"input_ids", "loss_mask", "rollout_logprobs", "policy_versions", "reward"})
    if settings.distillation.texts is not None:
        rollout_columns -= {"reward"}
    rollout_columns |= component_columns(gdpo_components(settings))
    late: dict[str, str] = {}
    if settings.algorithm.kl_coefficient:
        late[REFERENCE] = "reference_logprobs"
    if settings.algorithm.old_logprobs == "recompute":
        late[OLD_LOGPROBS] = "old_logprobs"
    if needs_critic(settings):
        late[VALUES] = "values"
    tasks = [
        TaskSpec(name=task, needs=rollout_columns, gives=frozenset({column}), order="issue")
        for task, column in late.items()
    ]
    given = frozenset(late.values())
    if has_teachers(settings):
        chosen = settings.distillation
        scored = teacher_task(with_hidden=chosen.needs_hidden, with_aligner=chosen.other_tokenizer == "align")
        tasks.append(scored)
        given |= scored.gives
    tasks.append(TaskSpec(name=TRAIN, needs=rollout_columns | given, order="issue"))
    return InProcessQueue(tasks)


def make_transport(settings: Settings) -> WeightTransport:
    """Tensors within a process; between two a file in shared memory, or buckets over the network."""
    weights = settings.weights
    if settings.rollout.placement == "inline":
        return TensorTransport()
    if weights.transport == "file":
        return SharedFileTransport()
    return BroadcastTransport(
        backend=weights.transport,
        host=weights.host,
        bucket_bytes=weights.bucket_mib << 20,
        deadline_s=weights.deadline_s,
    )


@contextmanager
def open_rollout(settings: Settings, inputs: Inputs, engine: RolloutEngine) -> Iterator[Rollout]:
    """The agent loop on an engine; its rewards and tools are closed in the end."""
    scorer = make_scorer(settings, inputs.tokenizer, engine)
    try:
        rollout = Rollout(
            engine,
            resolve_loop(settings.rollout.loop, settings.rollout.loop_options),
            scorer=scorer,
            decode=inputs.tokenizer.decode,
            tokenizer=inputs.tokenizer,
            options=RolloutOptions(audit=AuditOptions(share=settings.rollout.audit_share, seed=settings.run.seed)),
        )
        try:
            yield rollout
        finally:
            rollout.close()
    finally:
        scorer.close()
