"""Interface through which an objective requests a comparison with teachers and reads its results."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rl_distill.learner import MicroBatch
from rl_distill.objectives.divergences import DivergenceOptions

MEASURED = "distillation/"
"""Prefix of the measures' column names."""
LOSSES = MEASURED + "losses"
"""Column with each token's divergence; it has a gradient unless the comparison is alone."""
WEIGHTED = MEASURED + "weighted"
"""Column with losses times `loss_weights`, with gradient, to be summed; present only if the comparison is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison that an objective requests.

    Attributes:
        options: Options of the divergence.
        is_alone: The loss has no other term. Logprobs and entropy then need no gradient, and the divergence is computed
            in one pass that neither stores all logits nor computes them twice.
    """

    options: DivergenceOptions
    is_alone: bool


def comparison_of(objective: Any) -> Comparison | None:
    """Return the comparison that an objective requests; None if it only needs logprobs."""
    return getattr(objective, "comparison", None)


def with_measures(micro: MicroBatch, measured: Mapping[str, Tensor]) -> MicroBatch:
    """Return a micro-batch with these columns added."""
    return replace(micro, columns={**micro.columns, **measured}) if measured else micro
