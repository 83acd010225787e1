"""Puts complete groups into the queue, limited to the sessions that it still lacks."""

from collections.abc import Callable, Collection, Sequence

from rl_core import Batch, TransferQueue
from rl_core.data import Prompt, Trajectory
from rl_rollout.rollout import GroupResult

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
