"""What the controller must remember, beside the learner, in every checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_trainer_parts.run.checkpoints import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncState(RunState):
    """The run at the end of a step.

    Attributes:
        num_trained: Groups trained so far.
        num_spent: Groups that failed and that no other replaced.
        validated: Last step that was validated; -1 before the first.
        unacked: Groups that this checkpoint has, and that the queue may not know as done.
    """

    num_trained: int = 0
    num_spent: int = 0
    validated: int = -1
    unacked: Sequence[str] = ()
