"""Groups to generate, and their outcomes: as generated, as refused by a filter, or as stored in the queue."""

from collections.abc import Callable, Collection, Sequence

from rl_core import Batch, TransferQueue
from rl_core.data import Prompt, Trajectory
from rl_core.queue import LedgerEntry
from rl_core.record_fields import record
from rl_rollout.refill import resolve_filter
from rl_rollout.rollout import GroupResult

REFUSED = "refused by "


@record
class Dispatch:
    """A group to generate.

    Attributes:
        prompt: The group's prompt.
        place: Position from 0 in training, if groups train in the order of issue. A replacement takes the place of the
            failed or refused group.
        sessions: Sessions that are not settled. An earlier rollouter may have settled the others.
    """

    prompt: Prompt
    place: int
    sessions: tuple[int, ...]


@record
class GroupEvent:
    """The outcome of a group.

    Attributes:
        uid: The prompt's uid.
        oldest: Oldest version of its tokens; None if this run sampled none of them.
        newest: Newest version of its tokens.
        failure: Reason why no step can train it; None if it is in the queue.
        is_refused: True if a filter refused it.
        took_s: Seconds from its start to the end of its last session.
        started: Policy version at its start.
    """

    uid: str
    oldest: int | None = None
    newest: int | None = None
    failure: str | None = None
    is_refused: bool = False
    took_s: float = 0.0
    started: int | None = None


class Refusals:
    """Filters groups, up to a maximum number of refusals per policy version.

    Without the maximum, a policy whose groups all have equal rewards would generate forever. Beyond it, groups that the
    filter would refuse are trained.

    Attributes:
        name: Name of the filter.
        num_made_up: Number of groups that train although the filter would have refused them.
    """

    def __init__(self, name: str, *, most: int) -> None:
        """Find the filter.

        Args:
            name: See `resolve_filter`.
            most: Maximum number of refused groups per version.

        Raises:
            SettingsError: The filter does not exist.
        """
        self.name = name
        self._filter = resolve_filter(name)
        self._most = most
        self._num_refused = 0
        self.num_made_up = 0

    def updated(self) -> None:
        """Reset the number of refusals after a weight update."""
        self._num_refused = 0

    def reason(self, group: GroupResult) -> str | None:
        """Return why a group is refused; None if it trains."""
        reason = self._filter(group) if group.trajectories else None
        if reason is None:
            return None
        if self._num_refused >= self._most:
            self.num_made_up += 1
            return None
        self._num_refused += 1
        return reason


def refusal(name: str, reason: str) -> str:
    """Return the reason with which sessions of a refused group are failed."""
    return f"{REFUSED}{name}: {reason}"


def is_refused(entry: LedgerEntry) -> bool:
    """Return True for a group whose sessions failed with a `refusal`."""
    return any(reason.startswith(REFUSED) for reason in entry.sessions_failed.values())


def generated_event(group: GroupResult, *, refused: str | None) -> GroupEvent:
    """Return the outcome of a group whose sessions were all generated at once.

    Args:
        group: The generated group.
        refused: Why a filter refused it; None if it did not.
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
    """Return the outcome of a group in the queue, from any generator. None while sessions are missing."""
    if entry.state == "settled":
        oldest, newest = entry.policy_versions or (None, None)
        return GroupEvent(uid=entry.prompt_uid, oldest=oldest, newest=newest)
    if entry.state == "dropped":
        return GroupEvent(uid=entry.prompt_uid, failure=entry.reason or "dropped", is_refused=is_refused(entry))
    return None


Put = Callable[[Sequence[tuple[Prompt, Trajectory]]], None]
"""Puts trajectories into a queue at once, each with its prompt."""


def settle(
    queue: TransferQueue,
    groups: Sequence[GroupResult],
    *,
    put: Put | None = None,
    only: Collection[int] | None = None,
    refused: str | None = None,
) -> None:
    """Settle sessions in the queue: all trajectories at once, and failed sessions with their reasons.

    Args:
        queue: The queue.
        groups: Complete groups.
        put: Puts the trajectories. None puts them with their present columns.
        only: Sessions to settle. None settles all.
        refused: Reason why no session may train; None if they may.
    """
    if put is None:
        put = lambda pairs: queue.put_batch(Batch.from_trajectories([row for _, row in pairs]))
    pairs = [
        (group.prompt, trajectory)
        for group in groups
        for trajectory in group.trajectories
        if refused is None and (only is None or trajectory.session_index in only)
    ]
    if pairs:
        put(pairs)
    for group in groups:
        for index, session in enumerate(group.sessions):
            reason = session.failure if refused is None else refused
            if reason is not None and (only is None or index in only):
                queue.fail(group.prompt.uid, index, reason=reason)
