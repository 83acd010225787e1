"""Messages between the controller and its roles: orders, reports and events.

They never contain weights, and contain rows only to record or to probe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_core import Prompt
from rl_core.data import Json
from rl_trainer_parts.reporting.rollout_rows import RolloutDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """A step to train.

    Attributes:
        step: Step number, from 1.
        uids: The groups, in order.
        version: Policy version at the start of the step.
        kl: State of the KL coefficient; empty before the first step.
        deadline_s: Maximum wait for columns from others, such as teachers.
    """

    step: int
    uids: tuple[str, ...]
    version: int
    kl: Mapping[str, float]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """The result of a step.

    Attributes:
        metrics: Reduced values by name.
        num_trajectories: Number of trajectories trained on.
        kl: State of the KL coefficient after the step.
        busy_s: Seconds of work, without waiting for rows.
        rollouts: Trajectories to record.
        histograms: Histograms by name, from `Histogram.to_json`.
    """

    metrics: Mapping[str, float]
    num_trajectories: int
    kl: Mapping[str, float]
    busy_s: float
    rollouts: Sequence[RolloutDraft] = ()
    histograms: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationBatch:
    """Validation prompts that are sent together.

    Attributes:
        split: "validation" or "test".
        step: Number of finished steps of the policy that answers.
        number: Index in the validation, from 0.
        prompts: The prompts.
    """

    split: str
    step: int
    number: int
    prompts: tuple[Prompt, ...]
