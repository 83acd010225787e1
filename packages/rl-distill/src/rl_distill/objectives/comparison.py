"""The interface by which an objective requests a comparison with teachers and reads its results.

An objective with an attribute `comparison` receives the measures of `TokenComparison` [T] as columns of the
micro-batch: `distillation/losses`, `distillation/student_mass` and so on. Logits never leave the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rl_distill.learner import MicroBatch
from rl_distill.objectives.divergences import DivergenceOptions

MEASURED = "distillation/"
"""Prefix of the measures' names."""
LOSSES = MEASURED + "losses"
"""Divergence of each token, with gradient unless the comparison is alone."""
WEIGHTED = MEASURED + "weighted"
"""Losses times the column `loss_weights`, with gradient, to sum; only if the comparison is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Computations on the logits.

    Attributes:
        options: The divergence.
        is_alone: The loss has no other part: logprobs and entropy have no gradient, and the divergence is computed in
            one pass that neither stores whole logits nor computes them twice.
    """

    options: DivergenceOptions
    is_alone: bool


def comparison_of(objective: Any) -> Comparison | None:
    """Return the comparison that an objective requests; None if it only needs logprobs."""
    return getattr(objective, "comparison", None)


def with_measures(micro: MicroBatch, measured: Mapping[str, Tensor]) -> MicroBatch:
    """A micro-batch with more columns."""
    return replace(micro, columns={**micro.columns, **measured}) if measured else micro
