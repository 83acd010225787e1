"""What becomes of a group: whether a filter refuses it, and what is told of it, as generated or as the queue has it."""

from rl_async_trainer.messages import GroupEvent
from rl_async_trainer.roles.rollout_window import RolloutWindow
from rl_async_trainer.settings import AsyncSettings
from rl_core.queue import LedgerEntry
from rl_rollout.filters import GroupFilter, resolve_filter
from rl_rollout.rollout import GroupResult

REFUSED = "refused by "


class Refusals:
    """Filters groups, within as many rounds of a version's groups as `refill.max_rounds` allows.

    Without the bound, a policy whose groups are all alike would generate for ever.

    The synchronous trainer keeps what its last round brings, whatever the filter says of it. Here groups come one by
    one: once so many were refused under one policy version as the rounds before the last one have, the others train.
    """

    def __init__(self, settings: AsyncSettings, window: RolloutWindow) -> None:
        """Find the filter of the settings, if there is one; the window counts what trains all the same."""
        name = settings.refill.filter
        self._filter: GroupFilter | None = resolve_filter(name) if name else None
        self._most = (settings.refill.max_rounds - 1) * settings.schedule_options.groups_per_version
        self._num_refused = 0
        self._window = window

    def updated(self) -> None:
        """The engines have new weights: the rounds begin anew."""
        self._num_refused = 0

    def reason(self, group: GroupResult) -> str | None:
        """Why a group is refused; None where it trains."""
        if self._filter is None or not group.trajectories:
            return None
        reason = self._filter(group)
        if reason is None:
            return None
        if self._num_refused >= self._most:
            self._window.made_up += 1
            return None
        self._num_refused += 1
        return reason


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
