"""Settings that only the asynchronous trainer has; `train --help` prints these docstrings."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from pydantic import Field

from rl_core.record_fields import NonNegativeInt, PositiveFloat, PositiveInt
from rl_rollout.schedule import ScheduleOptions
from rl_trainer_parts.settings.schema import UPDATE_KL, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """How far generation may run ahead of training.

    Attributes:
        max_staleness: Maximum staleness: how many policy versions the oldest token of a group may be behind the weights
            that train on it. 0 trains only on tokens of the current version.
        sync_every: Learner steps between weight updates; each update is one policy version.
        partial_rollout: Let responses continue across weight updates; each token records its version. With false,
            engines finish all running responses before an update, so each response has one version.
        max_inflight_groups: Maximum number of groups generated at once; with none, only max_staleness limits it.
        validate_on: Where validation runs during training: on the "engines", with the weights they serve, or on the
            "learner" side, in an extra engine with the weights of exactly that step.
        validation_batch: Maximum number of validation prompts in flight; none sends all at once.
    """

    max_staleness: NonNegativeInt = 1
    sync_every: PositiveInt = 1
    partial_rollout: bool = True
    max_inflight_groups: PositiveInt | None = None
    validate_on: Literal["engines", "learner"] = "engines"
    validation_batch: PositiveInt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """Where rollouter and learner run, and what happens when one dies.

    Attributes:
        placement: "ray" (Ray actors, on one or more machines), "process" (processes on this machine) or "inline" (in
            this process, easy to debug). `rollout.placement` and `cluster.placement` place its engines and ranks.
        rollouter_restarts: How often a dead rollouter is restarted; its groups are generated again.
        learner_restarts: How often a dead learner is restarted, from the last checkpoint.
        controller_restarts: How often the controller is restarted after its process is killed.
        teacher_restarts: How often the process that queries the teachers is restarted.
        start_deadline_s: Maximum time for a role to start.
        heartbeat_deadline_s: A role that does not answer for this long is killed and restarted.
        hang_deadline_s: Time without progress after which hang.json is written; it shows what each role does.
        on_hang: What happens after that: "fail" stops the run, "report" lets it continue.
    """

    placement: Literal["inline", "process", "ray"] = "ray"
    rollouter_restarts: NonNegativeInt = 5
    learner_restarts: NonNegativeInt = 5
    controller_restarts: NonNegativeInt = 5
    teacher_restarts: NonNegativeInt = 5
    start_deadline_s: PositiveFloat = 900.0
    heartbeat_deadline_s: PositiveFloat = 300.0
    hang_deadline_s: PositiveFloat = 5400.0
    on_hang: Literal["fail", "report"] = "fail"


class AsyncSettings(Settings):
    """All settings of an asynchronous run."""

    also_changeable_on_resume: ClassVar[tuple[str, ...]] = (
        *("schedule.max_inflight_groups", "schedule.validate_on", "schedule.validation_batch"),
        *(f"roles.{field.name}" for field in fields(RoleSettings)),
    )

    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    roles: RoleSettings = Field(default_factory=RoleSettings)

    @property
    def placements(self) -> dict[str, str]:
        """Where each part of the run is placed, by the setting that decides it."""
        return {"roles.placement": self.roles.placement, **super().placements}

    @property
    def zero_metrics(self) -> tuple[str, ...]:
        """Metrics that are 0 by design, unless sampled tokens are compared with an older version."""
        is_older = self.algorithm.old_logprobs == "rollout" and not self.schedule_options.is_on_policy
        return UPDATE_KL if self.has_one_update and not is_older else ()

    @property
    def schedule_options(self) -> ScheduleOptions:
        """Options of the scheduler."""
        return ScheduleOptions(
            groups_per_step=self.rollout.prompts_per_step,
            num_steps=self.trainer.steps,
            max_staleness=self.schedule.max_staleness,
            sync_every=self.schedule.sync_every,
            max_inflight_groups=self.schedule.max_inflight_groups,
        )


def schedule_problems(settings: AsyncSettings) -> Iterator[str]:
    """Problems of the asynchronous settings."""
    schedule = settings.schedule
    options = settings.schedule_options
    limit = schedule.max_inflight_groups
    if options.is_on_policy and limit is not None and limit < settings.rollout.prompts_per_step:
        yield (
            f"schedule.max_inflight_groups = {limit} must be at least rollout.prompts_per_step = "
            f"{settings.rollout.prompts_per_step} on policy, so that batches equal those of a synchronous run. Leave "
            "it out, or set schedule.max_staleness = 1."
        )
    if settings.distillation.texts is not None:
        yield (
            "distillation.texts trains on existing texts, so there is no generation to overlap with training. Use "
            "rl-sync-trainer."
        )
    if settings.rollout_cache.enabled and settings.rollout_cache.validation:
        yield (
            "rollout_cache.validation replays a validation only for the same weights, but in an asynchronous run they "
            "depend on time. Leave it out, or use rl-sync-trainer."
        )
    if settings.rollout.offload_engine or settings.trainer.offload_learner:
        yield (
            "rollout.offload_engine and trainer.offload_learner are for devices that generation and training use in "
            "turn, but here both run at once. Leave them out, or use rl-sync-trainer."
        )
