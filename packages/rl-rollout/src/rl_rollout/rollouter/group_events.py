"""Groups to generate, and the outcome of them: as generated, as a filter refused them, or as the queue has them."""

from rl_core.data import Prompt
from rl_core.queue import LedgerEntry
from rl_core.record_fields import record
from rl_rollout.filters import resolve_filter
from rl_rollout.rollout import GroupResult

REFUSED = "refused by "


@record
class Dispatch:
    """A group to generate.

    Attributes:
        prompt: Its prompt.
        order: Its place in the order of issue, from 0.
        sessions: Those that are not settled; an earlier rollouter may have settled the others.
    """

    prompt: Prompt
    order: int
    sessions: tuple[int, ...]


@record
class GroupEvent:
    """Outcome of a group.

    Attributes:
        uid: Its prompt.
        oldest: Oldest version of its tokens; None where nothing was sampled.
        newest: Newest one.
        failure: Why no step will have it; None when it is in the queue.
        is_refused: A filter refused it.
        took_s: From its start to its last session.
        started: Version that was served when it was begun.
    """

    uid: str
    oldest: int | None = None
    newest: int | None = None
    failure: str | None = None
    is_refused: bool = False
    took_s: float = 0.0
    started: int | None = None


class Refusals:
    """Filters groups, and refuses only so many under one policy version.

    Without the bound, a policy whose groups are all alike would generate for ever. Groups that the filter would refuse
    beyond it train.

    Attributes:
        name: Of the filter.
        num_made_up: Groups that train although the filter would have refused them.
    """

    def __init__(self, name: str, *, most: int) -> None:
        """Find the filter.

        Args:
            name: See `resolve_filter`.
            most: Groups that may be refused under one version.

        Raises:
            SettingsError: There is no such filter.
        """
        self.name = name
        self._filter = resolve_filter(name)
        self._most = most
        self._num_refused = 0
        self.num_made_up = 0

    def updated(self) -> None:
        """The engines have new weights: as many may be refused again."""
        self._num_refused = 0

    def reason(self, group: GroupResult) -> str | None:
        """Why a group is refused; None where it trains."""
        reason = self._filter(group) if group.trajectories else None
        if reason is None:
            return None
        if self._num_refused >= self._most:
            self.num_made_up += 1
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
    """Outcome of a group whose sessions were all generated at once.

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
    """Outcome of a group in the queue, from any generator; None while sessions are missing."""
    if entry.state == "settled":
        oldest, newest = entry.policy_versions or (None, None)
        return GroupEvent(uid=entry.prompt_uid, oldest=oldest, newest=newest)
    if entry.state == "dropped":
        return GroupEvent(uid=entry.prompt_uid, failure=entry.reason or "dropped", is_refused=is_refused(entry))
    return None
