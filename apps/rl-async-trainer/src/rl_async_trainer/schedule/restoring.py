"""Restore the schedule of the last launch from the checkpoint, the queue's ledger and the record."""

from collections.abc import Sequence

from rl_async_trainer.schedule.places import Places
from rl_async_trainer.schedule.record import History
from rl_async_trainer.schedule.replay import ReplayPlan, ReplayScheduler
from rl_async_trainer.schedule.run_state import AsyncState
from rl_core import TransferQueue
from rl_core.errors import CheckpointError
from rl_core.queue import LedgerEntry
from rl_rollout.prompts import PromptSupply
from rl_rollout.rollouter import is_refused
from rl_rollout.schedule import ScheduleOptions, Scheduler
from rl_trainer_parts.rollouts.setup import TRAIN


def restore_schedule(
    options: ScheduleOptions,
    state: AsyncState,
    queue: TransferQueue,
    supply: PromptSupply,
    history: History,
    *,
    plan: ReplayPlan | None = None,
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
        plan: Plan of the recorded run to replay.

    Raises:
        CheckpointError: The queue has acked groups that the checkpoint does not have.
        DataError: The queue belongs to other prompts.
        RolloutError: A group of `plan` failed in an earlier launch.
    """
    _ack_saved(queue, state)
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
    arrivals = {uid: place for place, uid in enumerate(history.settled)}
    settled: list[LedgerEntry] = []
    for entry in ledger:
        if entry.state in ("done", "dropped"):
            if entry.state == "dropped" and isinstance(scheduler, ReplayScheduler):
                scheduler.require_group(entry.prompt_uid, failure=entry.reason or "dropped")
            continue
        scheduler.issued([entry.prompt_uid], begun=history.begun.get(entry.prompt_uid))
        if entry.state == "settled":
            settled.append(entry)
    for entry in sorted(settled, key=lambda one: arrivals.get(one.prompt_uid, len(arrivals))):
        uid = entry.prompt_uid
        oldest, _ = history.settled.get(uid) or entry.policy_versions or (None, None)  # a kill may have lost the line
        sampled = scheduler.sampled_since(uid, oldest)
        if sampled is None:
            scheduler.replayed.add(uid)
        scheduler.settled(uid, oldest_version=history.started.get(uid) if sampled is None else sampled)
    _redo_spent(scheduler, options, state, ledger)
    scheduler.force(_known(history.steps_after(state.step), ledger) if plan is None else plan.steps[state.step :])
    return scheduler


def restore_places(options: ScheduleOptions, ledger: Sequence[LedgerEntry], history: History) -> Places:
    """Return the places of the prompts that the queue has issued, without those of replaced groups."""
    kept = [
        entry.prompt_uid
        for entry in ledger
        if entry.state != "dropped" or (options.is_on_policy and not is_refused(entry))
    ]
    places = Places({uid: history.places[uid] for uid in kept if uid in history.places})
    places.take(kept)  # a kill may have lost the line of the last ones
    return places


def _ack_saved(queue: TransferQueue, state: AsyncState) -> None:
    open_uids = {entry.prompt_uid for entry in queue.ledger() if entry.state == "settled"}
    missing = [uid for uid in state.unacked if uid in open_uids]
    if missing:
        queue.finish(TRAIN, missing)


def _redo_spent(
    scheduler: Scheduler, options: ScheduleOptions, state: AsyncState, ledger: Sequence[LedgerEntry]
) -> None:
    """On policy, groups that failed after the checkpoint count towards their step as before."""
    if options.is_on_policy:
        failed = sum(entry.state == "dropped" and not is_refused(entry) for entry in ledger)
        scheduler.num_spent = max(state.num_spent, failed)


def _known(steps: Sequence[tuple[str, ...]], ledger: Sequence[LedgerEntry]) -> list[tuple[str, ...]]:
    """Recorded steps, up to the first with a group that is no longer available."""
    open_uids = {entry.prompt_uid for entry in ledger if entry.state in ("issued", "settled")}
    found = []
    for step in steps:
        if not open_uids.issuperset(step):
            break
        found.append(step)
    return found
