"""What the loop itself must remember, beside the learners, in every checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.store import STATE_FILE, read_state


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the loop itself must remember, at the end of a step.

    Attributes:
        step: Last finished step.
        policy_version: Version that the engines served.
        prompt_source: State of the prompt source.
        num_samples: Trajectories trained on.
        wall_s: Seconds spent so far, over all launches.
        steps_wall_s: Seconds of the training steps alone.
        results: Validation results by name, such as "validation_accuracy_first".
        kl: State of the KL's coefficient; empty before the first step.
        unlogged: Metrics of `step` while it is not validated and logged; none when it is.
    """

    step: int = 0
    policy_version: int = 0
    prompt_source: Mapping[str, Any] = field(default_factory=dict)
    num_samples: int = 0
    wall_s: float = 0.0
    steps_wall_s: float = 0.0
    results: Mapping[str, float] = field(default_factory=dict)
    kl: Mapping[str, float] = field(default_factory=dict)
    unlogged: Mapping[str, float] | None = None


def read_trainer_state(folder: Path) -> TrainerState:
    """The loop's state of a verified checkpoint.

    Raises:
        CheckpointError: It is not readable.
    """
    try:
        return TrainerState(**read_state(folder))
    except TypeError as error:
        raise CheckpointError(f"{folder / STATE_FILE} is not readable: {error}.") from None
