"""Restore the schedule of the last launch from the checkpoint, the queue's ledger and the record; or replay a run's.

A replay has the same groups in the same steps, started under the same versions. With the recorded run's skip cache the
groups are equal token for token, and on CPUs so are the losses.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import takewhile
from pathlib import Path

from rl_async_trainer.record import FILE, AsyncState, ScheduleHistory, read_history
from rl_core import TransferQueue
from rl_core.errors import CheckpointError, RolloutError, SettingsError
from rl_core.queue import LedgerEntry
from rl_rollout.prompts import PromptSupply
from rl_rollout.rollouter import is_refused
from rl_rollout.schedule import ScheduleOptions, Scheduler
from rl_trainer_parts.rollouts.setup import TRAIN


def read_plan(folder: Path, options: ScheduleOptions) -> ScheduleHistory:
    """Read what a replay repeats of a recorded run: its steps, prompts up to the last trained one, and trained groups.

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
    return ScheduleHistory(
        issued=dict.fromkeys(list(history.issued)[: last + 1]),
        steps=dict(enumerate(steps, start=1)),
        started={uid: version for uid, version in history.started.items() if uid in trained},
        places={uid: place for uid, place in history.places.items() if uid in trained},
    )


@dataclass(slots=True)
class ReplayScheduler(Scheduler):
    """A scheduler that follows a plan; its steps are forced.

    Attributes:
        plan: See `read_plan`.
    """

    plan: ScheduleHistory = field(default_factory=ScheduleHistory)

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
        for number, step in self.plan.steps.items():
            if uid in step:
                raise RolloutError(
                    f"the recorded run trained group {uid} in step {number}, but the group failed in the replay: "
                    f"{failure.rstrip('.')}. Its entry in the skip cache is missing, or its reward or filter now "
                    "fails. Replay with the recorded run's skip cache, reward and filter, and another run.name."
                )


def issue_replayed(
    plan: ScheduleHistory, scheduler: Scheduler, queue: TransferQueue, supply: PromptSupply, *, group_size: int
) -> None:
    """Issue all prompts of a plan that no earlier launch of the replay has issued.

    Raises:
        SettingsError: The recorded run had other prompts.
    """
    known = len(queue.ledger())
    prompts = supply.next(len(plan.issued) - known)
    for prompt, uid in zip(prompts, list(plan.issued)[known:], strict=True):
        if prompt.uid != uid:
            raise SettingsError(
                f"--replay: the recorded run issued prompt {uid!r}, but these settings issue {prompt.uid!r}. "
                "Replay with the prompt files, tokenizer, limits and seed of the recorded run."
            )
    if prompts:
        queue.issue(prompts, num_sessions=group_size)
        scheduler.issued(prompt.uid for prompt in prompts)


class PromptPlaces:
    """The place of each prompt in training, if groups train in the order of issue, as a skip cache's steps do.

    Prompts are numbered from 0. A replacement takes the place of a group that failed or was refused.
    """

    def __init__(self, taken: Mapping[str, int]) -> None:
        """Continue after the places that earlier launches gave to groups that were not replaced."""
        self._of = dict(taken)
        used = set(self._of.values())
        self._next = max(used, default=-1) + 1
        self._vacant = sorted(set(range(self._next)) - used)

    def take(self, uids: Iterable[str]) -> dict[str, int]:
        """Return the place of each prompt; a new one gets the first vacant place, or else the next."""
        uids = list(uids)
        for uid in uids:
            if uid not in self._of:
                self._of[uid] = heappop(self._vacant) if self._vacant else self._next
                self._next = max(self._next, self._of[uid] + 1)
        return {uid: self._of[uid] for uid in uids}

    def vacate(self, uid: str) -> None:
        """Free the place of a group that will be replaced."""
        if uid in self._of:
            heappush(self._vacant, self._of.pop(uid))


def restore_schedule(
    options: ScheduleOptions,
    state: AsyncState,
    queue: TransferQueue,
    supply: PromptSupply,
    history: ScheduleHistory,
    *,
    plan: ScheduleHistory | None = None,
) -> Scheduler:
    """Bring queue, prompts and scheduler to the state from which a run resumes, or to the start of a new one.

    Groups trained in the checkpoint are acked, if the last launch died before it could. Steps trained after the
    checkpoint are trained again with the same groups. Finished groups are kept, and groups in flight are started again.

    Args:
        options: The schedule's options.
        state: State in the checkpoint, or of a new run.
        queue: The run's queue, with its journal.
        supply: Prompt supply, at its first prompt.
        history: Contents of the record.
        plan: See `read_plan`; None for a run that is no replay.

    Raises:
        CheckpointError: The queue has acked groups that the checkpoint does not have.
        DataError: The queue belongs to other prompts.
        RolloutError: A group of `plan` failed in an earlier launch.
    """
    settled = {entry.prompt_uid for entry in queue.ledger() if entry.state == "settled"}
    if unacked := [uid for uid in state.unacked if uid in settled]:
        queue.finish(TRAIN, unacked)
    ledger = queue.ledger()
    num_done = sum(entry.state == "done" for entry in ledger)
    if num_done > state.num_trained:
        raise CheckpointError(
            f"the run's queue has acked {num_done} groups, but the newest complete checkpoint, of step {state.step}, "
            f"contains only {state.num_trained}: a later checkpoint is missing. Restore it, or start a new run."
        )
    supply.restore(ledger)
    scheduler = Scheduler(options) if plan is None else ReplayScheduler(options, plan=plan)
    scheduler.num_trained, scheduler.num_spent, scheduler.num_steps = state.num_trained, state.num_spent, state.step
    scheduler.served_version = state.step // options.sync_every
    for entry in ledger:
        if entry.state == "dropped" and isinstance(scheduler, ReplayScheduler):
            scheduler.require_group(entry.prompt_uid, failure=entry.reason or "dropped")
        if entry.state in ("issued", "settled"):
            scheduler.issued([entry.prompt_uid], begun=history.begun.get(entry.prompt_uid))
    _restore_settled(scheduler, ledger, history)
    if options.is_on_policy:  # groups that failed after the checkpoint count towards their step as before
        failed = sum(entry.state == "dropped" and not is_refused(entry) for entry in ledger)
        scheduler.num_spent = max(state.num_spent, failed)
    if plan is None:
        available = {entry.prompt_uid for entry in ledger if entry.state in ("issued", "settled")}
        scheduler.force(takewhile(available.issuperset, history.steps_after(state.step)))
    else:
        scheduler.force(plan.steps_after(state.step))
    return scheduler


def _restore_settled(scheduler: Scheduler, ledger: Sequence[LedgerEntry], history: ScheduleHistory) -> None:
    """Settle finished groups, in the order of their arrival."""
    settled = {entry.prompt_uid: entry for entry in ledger if entry.state == "settled"}
    arrived = [uid for uid in history.settled if uid in settled]
    for uid in dict.fromkeys([*arrived, *settled]):
        oldest, _ = history.settled.get(uid) or settled[uid].policy_versions or (None, None)  # a kill loses a line
        sampled = scheduler.sampled_since(uid, oldest)
        if sampled is None:
            scheduler.replayed.add(uid)
        scheduler.settled(uid, oldest_version=history.started.get(uid) if sampled is None else sampled)


def restore_places(options: ScheduleOptions, ledger: Sequence[LedgerEntry], history: ScheduleHistory) -> PromptPlaces:
    """Return the places of the prompts that the queue has issued, without those of replaced groups."""
    kept = [
        entry.prompt_uid
        for entry in ledger
        if entry.state != "dropped" or (options.is_on_policy and not is_refused(entry))
    ]
    places = PromptPlaces({uid: history.places[uid] for uid in kept if uid in history.places})
    places.take(kept)  # a kill may have lost the line of the last ones
    return places
