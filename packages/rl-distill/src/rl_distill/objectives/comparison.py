"""How an objective asks a learner to compare the policy with teachers, and finds what came of it.

An objective that has an attribute `comparison` gets, beside the logprobs, the measures of `TokenComparison` [T] as
columns of the micro-batch: `distillation/losses`, `distillation/student_mass` and so on. Logits never leave the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rl_distill.learner import MicroBatch
from rl_distill.objectives.divergences import DivergenceOptions

MEASURED = "distillation/"
"""What the names of the measures begin with."""
LOSSES = MEASURED + "losses"
"""The divergence of each token; with gradient, unless the comparison is alone."""
WEIGHTED = MEASURED + "weighted"
"""Where the comparison is alone: the losses times the column `loss_weights`, with gradient; to be summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Computations on the logits.

    Attributes:
        options: The divergence.
        is_alone: Nothing else trains: logprobs and entropy come without gradient, and the divergence is taken in one
            pass, without its logits ever being whole or made twice.
    """

    options: DivergenceOptions
    is_alone: bool


def comparison_of(objective: Any) -> Comparison | None:
    """What an objective asks for; None where it needs logprobs alone."""
    return getattr(objective, "comparison", None)


def with_measures(micro: MicroBatch, measured: Mapping[str, Tensor]) -> MicroBatch:
    """A micro-batch with more columns."""
    return replace(micro, columns={**micro.columns, **measured}) if measured else micro
