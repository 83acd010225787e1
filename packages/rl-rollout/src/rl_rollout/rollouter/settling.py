"""Whole groups into the queue, by the sessions that it still lacks."""

from collections.abc import Callable, Collection, Sequence

from rl_core import Batch, TransferQueue
from rl_core.data import Prompt, Trajectory
from rl_rollout.rollout import GroupResult

Put = Callable[[Sequence[tuple[Prompt, Trajectory]]], None]
"""Puts trajectories, each with its prompt, into a queue at once."""


def settle(
    queue: TransferQueue,
    groups: Sequence[GroupResult],
    *,
    put: Put | None = None,
    only: Collection[int] | None = None,
    refused: str | None = None,
) -> None:
    """Settle the sessions of groups in the queue: their trajectories at once, and those that failed with their reasons.

    Args:
        queue: Where to.
        groups: Whole groups.
        put: Puts the trajectories; None puts them with the columns that they have.
        only: Sessions that are still to be settled; None settles all.
        refused: Why no session may train; None if they may.
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
