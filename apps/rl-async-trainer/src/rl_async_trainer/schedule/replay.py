"""Replay a recorded run: the same groups in the same steps, started under the same versions.

With the recorded run's skip cache the groups are equal token for token, and on CPUs so are the losses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_async_trainer.schedule.record import FILE, read_history
from rl_core import TransferQueue
from rl_core.errors import RolloutError, SettingsError
from rl_rollout.prompts import PromptSupply
from rl_rollout.schedule import ScheduleOptions, Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The schedule of a recorded run.

    Attributes:
        issued: Its prompts in order, up to the last trained one.
        steps: Groups of each step.
        started: Version under which each trained group was started.
        places: Place of each trained group in the order of training.
    """

    issued: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]
    started: Mapping[str, int]
    places: Mapping[str, int] = field(default_factory=dict)


def read_plan(folder: Path, options: ScheduleOptions) -> ReplayPlan:
    """Read the plan of a recorded run.

    Raises:
        SettingsError: The folder has no record, or the record has fewer steps.
        DataError: The record is broken.
    """
    history = read_history(folder)
    steps = history.steps_after(0)
    if len(steps) < options.num_steps:
        raise SettingsError(
            f"--replay: {folder / FILE} has {len(steps)} steps, and trainer.steps = {options.num_steps}. Use the "
            "folder of a longer run, or lower trainer.steps."
        )
    steps = steps[: options.num_steps]
    trained = {uid for step in steps for uid in step}
    last = max(place for place, uid in enumerate(history.issued) if uid in trained)
    return ReplayPlan(
        issued=tuple(history.issued)[: last + 1],
        steps=tuple(steps),
        started={uid: version for uid, version in history.started.items() if uid in trained},
        places={uid: place for uid, place in history.places.items() if uid in trained},
    )


@dataclass(slots=True)
class ReplayScheduler(Scheduler):
    """A scheduler that follows a plan; its steps are forced.

    Attributes:
        plan: The recorded run's plan.
    """

    plan: ReplayPlan = field(default_factory=lambda: ReplayPlan(issued=(), steps=(), started={}))

    def num_to_start(self) -> int:
        """Waiting prompts whose version is served."""
        return len(self.to_start()[0])

    def to_start(self) -> tuple[list[str], int]:
        """Those prompts; no further ones are issued, because all are issued at the start."""
        never = self.options.num_steps + 1
        return [uid for uid in self._waiting if self.plan.started.get(uid, never) <= self.served_version], 0

    def require_group(self, uid: str, *, failure: str) -> None:
        """Refuse to continue without a group that the recorded run trained on, because its step cannot be repeated.

        Args:
            uid: The failed group.
            failure: Why it failed.

        Raises:
            RolloutError: A step to repeat trained on it.
        """
        for number, step in enumerate(self.plan.steps, start=1):
            if uid in step:
                raise RolloutError(
                    f"the recorded run trained group {uid} in step {number}, but the group failed in the replay: "
                    f"{failure.rstrip('.')}. Its entry in the skip cache is missing, or its reward or filter now "
                    "fails. Replay with the recorded run's skip cache, reward and filter, and another run.name."
                )


def issue_replayed(
    plan: ReplayPlan, scheduler: Scheduler, queue: TransferQueue, supply: PromptSupply, *, group_size: int
) -> None:
    """Issue all prompts of a plan that no earlier launch of the replay has issued.

    Raises:
        SettingsError: The recorded run had other prompts.
    """
    known = len(queue.ledger())
    prompts = supply.next(len(plan.issued) - known)
    for prompt, uid in zip(prompts, plan.issued[known:], strict=True):
        if prompt.uid != uid:
            raise SettingsError(
                f"--replay: the recorded run issued prompt {uid!r}, but these settings issue {prompt.uid!r}. "
                "Replay with the prompt files, tokenizer, limits and seed of the recorded run."
            )
    if prompts:
        queue.issue(prompts, num_sessions=group_size)
        scheduler.issued(prompt.uid for prompt in prompts)
