"""The trainer's own state in a checkpoint, beside the learners'."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rl_core.errors import CheckpointError
from rl_distill.checkpoints import STATE_FILE, read_state


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run at the end of a step, in both trainers.

    Attributes:
        step: Last finished step.
        policy_version: Version of the learner's weights.
        num_samples: Number of trajectories trained on.
        wall_s: Seconds so far, over all launches.
        steps_wall_s: Seconds spent in training steps.
        results: Validation results by name, such as "validation_accuracy_first".
        kl: State of the KL coefficient; empty before the first step.
    """

    step: int = 0
    policy_version: int = 0
    num_samples: int = 0
    wall_s: float = 0.0
    steps_wall_s: float = 0.0
    results: Mapping[str, float] = field(default_factory=dict)
    kl: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState(RunState):
    """State of the synchronous loop.

    Attributes:
        prompt_source: The prompt source's state.
        unlogged: Metrics of `step` until it is validated and logged; then None.
    """

    prompt_source: Mapping[str, Any] = field(default_factory=dict)
    unlogged: Mapping[str, float] | None = None


State = TypeVar("State", bound=RunState)


def read_run_state(folder: Path, kind: type[State]) -> State:
    """Read the state from a verified checkpoint.

    Raises:
        CheckpointError: The state is not readable.
    """
    try:
        return kind(**read_state(folder))
    except TypeError as error:
        raise CheckpointError(f"{folder / STATE_FILE} is not readable: {error}.") from None
