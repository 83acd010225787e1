"""What the controller and its roles tell one another: orders, reports and events.

Weights never, and of rows the few that people read, or that the policy is asked about.
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
        step: Its number, from 1.
        uids: The groups, in order.
        version: Policy version of the weights that it starts from.
        kl: State of the KL's coefficient; empty before the first step.
        deadline_s: Longest wait for columns that others give, such as teachers.
    """

    step: int
    uids: tuple[str, ...]
    version: int
    kl: Mapping[str, float]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """What a step did.

    Attributes:
        metrics: Reduced values by name.
        num_trajectories: Trained on.
        kl: State of the KL's coefficient after it.
        busy_s: Seconds that the learner worked on it; waiting for rows is not in them.
        rollouts: Trajectories that are to be written down.
        histograms: Distributions by name, as `Histogram.to_json` gives them.
    """

    metrics: Mapping[str, float]
    num_trajectories: int
    kl: Mapping[str, float]
    busy_s: float
    rollouts: Sequence[RolloutDraft] = ()
    histograms: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationBatch:
    """Problems that are asked together.

    Attributes:
        split: "validation" or "test".
        step: Steps done by the policy that answers.
        number: Counted from 0 within the validation.
        prompts: The problems.
    """

    split: str
    step: int
    number: int
    prompts: tuple[Prompt, ...]
