"""What a trainer itself must remember, beside the learners, in every checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rl_core.errors import CheckpointError
from rl_distill.checkpoints import STATE_FILE, read_state


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run at the end of a step, in both trainers.

    Attributes:
        step: Last finished step.
        policy_version: Version of the learner's weights.
        num_samples: Trajectories trained on.
        wall_s: Seconds spent so far, over all launches.
        steps_wall_s: Seconds of the training steps alone.
        results: Validation results by name, such as "validation_mean_reward_first".
        kl: State of the KL's coefficient; empty before the first step.
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
    """What the synchronous loop must remember.

    Attributes:
        prompt_source: State of the prompt source.
        unlogged: Metrics of `step` while it is not validated and logged; none when it is.
    """

    prompt_source: Mapping[str, Any] = field(default_factory=dict)
    unlogged: Mapping[str, float] | None = None


State = TypeVar("State", bound=RunState)


def read_run_state(folder: Path, kind: type[State]) -> State:
    """The state in a verified checkpoint.

    Raises:
        CheckpointError: It is not readable.
    """
    try:
        return kind(**read_state(folder))
    except TypeError as error:
        raise CheckpointError(f"{folder / STATE_FILE} is not readable: {error}.") from None
