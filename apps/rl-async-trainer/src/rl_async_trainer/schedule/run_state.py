"""The controller's state in a checkpoint, beside the learner's."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_trainer_parts.run.checkpoints import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncState(RunState):
    """The run at the end of a step.

    Attributes:
        num_trained: Number of groups trained so far.
        num_spent: Number of groups that failed and were not replaced.
        validated: Last validated step; -1 before the first.
        unacked: Groups in this checkpoint that the queue may not know as done.
    """

    num_trained: int = 0
    num_spent: int = 0
    validated: int = -1
    unacked: Sequence[str] = ()
