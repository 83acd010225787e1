"""What the controller must remember, beside the learner, in every checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.store import STATE_FILE, read_state


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncState:
    """The run at the end of a step.

    Attributes:
        step: Last finished step.
        policy_version: Version of the learner's weights.
        num_trained: Groups trained so far.
        num_spent: Groups that failed and that no other replaced.
        num_samples: Trajectories trained on.
        wall_s: Seconds spent so far, over all launches.
        steps_wall_s: Seconds of the training steps alone.
        results: Validation results by name, such as "validation_accuracy_first".
        validated: Last step that was validated; -1 before the first.
        kl: State of the KL's coefficient; empty before the first step.
        unacked: Groups that this checkpoint has, and that the queue may not know as done.
    """

    step: int = 0
    policy_version: int = 0
    num_trained: int = 0
    num_spent: int = 0
    num_samples: int = 0
    wall_s: float = 0.0
    steps_wall_s: float = 0.0
    results: Mapping[str, float] = field(default_factory=dict)
    validated: int = -1
    kl: Mapping[str, float] = field(default_factory=dict)
    unacked: tuple[str, ...] = ()


def read_run_state(folder: Path) -> AsyncState:
    """The controller's state of a verified checkpoint.

    Raises:
        CheckpointError: It is not readable.
    """
    try:
        content = read_state(folder)
        return AsyncState(**{**content, "unacked": tuple(content.get("unacked", ()))})
    except TypeError as error:
        raise CheckpointError(f"{folder / STATE_FILE} is not readable: {error}.") from None
