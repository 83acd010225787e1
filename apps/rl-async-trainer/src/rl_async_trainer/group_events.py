"""What became of a group: as it was generated, and as the queue's ledger has it."""

from rl_async_trainer.messages import GroupEvent
from rl_core.queue import LedgerEntry
from rl_rollout.rollout import GroupResult

REFUSED = "refused by "


def refusal(name: str, reason: str) -> str:
    """Why the sessions of a group have no rows that this filter refused."""
    return f"{REFUSED}{name}: {reason}"


def is_refused(entry: LedgerEntry) -> bool:
    """True for a group whose sessions failed with a `refusal`."""
    return any(reason.startswith(REFUSED) for reason in entry.sessions_failed.values())


def generated_event(group: GroupResult, *, refused: str | None) -> GroupEvent:
    """What became of a group whose sessions were all generated at once.

    Args:
        group: With what was generated.
        refused: Why a filter refused it; None where none did.
    """
    versions = [t.policy_versions[t.loss_mask] for t in group.trajectories]
    return GroupEvent(
        uid=group.prompt.uid,
        oldest=min((int(v.min()) for v in versions if len(v)), default=None),
        newest=max((int(v.max()) for v in versions if len(v)), default=None),
        failure=refused or (None if group.trajectories else f"all sessions failed; the first: {group.failures[0]}"),
        is_refused=refused is not None,
    )


def queued_event(entry: LedgerEntry) -> GroupEvent | None:
    """What became of a group as the queue has it, whoever generated which session; None while some are missing."""
    if entry.state == "settled":
        oldest, newest = entry.policy_versions or (None, None)
        return GroupEvent(uid=entry.prompt_uid, oldest=oldest, newest=newest)
    if entry.state == "dropped":
        return GroupEvent(uid=entry.prompt_uid, failure=entry.reason or "dropped", is_refused=is_refused(entry))
    return None
