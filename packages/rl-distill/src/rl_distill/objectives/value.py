"""The critic's objective: squared error to the returns, with value clipping.

Source: Schulman et al. 2017, arXiv:1707.06347; clipped value loss as in OpenAI Baselines' ppo2.
"""

import math
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from rl_core.record_fields import converts_arguments, settings_record
from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.objectives.micro_batches import masked, needed_column
from rl_distill.objectives.shapes import check_mask, check_tokens

ValueClip = Annotated[float, Gt(0)]
"""Maximum distance of the values from the old ones; values beyond are clipped."""


@converts_arguments
def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: ValueClip = 0.2
) -> tuple[Tensor, Tensor]:
    """Return half the larger of two squared errors: of the values, and of the values clipped around the old ones.

    Args:
        values: [T] float values of the critic in training.
        old_values: [T] float values of the critic before this batch's updates.
        returns: [T] float targets.
        clip: Maximum distance from the old values; math.inf disables the clip.

    Returns:
        [T] losses, and [T] 1 where the clip removed the gradient, else 0.

    Raises:
        ShapeError: An argument is not [T].
        SettingsError: clip is not above 0.
    """
    check_tokens({"values": values, "old_values": old_values, "returns": returns})
    held = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip) if math.isfinite(clip) else values
    plain, bounded = (values - returns).square(), (held - returns).square()
    return 0.5 * torch.maximum(plain, bounded), (bounded > plain).detach().to(values.dtype)


@settings_record
class ValueObjective:
    """A `ValueLoss`; call it with values [T] of the critic in training, and the micro-batch.

    values[t] is the value of the state before token t, as in the column `values`.

    Columns: `values` (of the critic before this batch's updates), `returns`, `loss_mask` and `loss_weights`. Tokens
    outside `loss_mask` are ignored.

    Metrics: `critic/vf_loss` is a mean weighted by `loss_weights`; `critic/vf_clipfrac` and `critic/vpred_mean` are
    means over trained tokens.

    Attributes:
        clip: See `value_losses`.
    """

    clip: ValueClip = 0.2

    def __call__(self, values: Tensor, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        """Return the loss of the micro-batch and its metric sums.

        Raises:
            ShapeError: A tensor is not [T].
            DataError: A needed column is missing.
        """
        who = "the critic's objective"
        mask = needed_column(micro, "loss_mask", who=who)
        check_mask(mask)
        predicted = masked(values, mask, name="the critic's values")
        names = ("values", "returns", "loss_weights")
        blank = {name: masked(needed_column(micro, name, who=who), mask, name=name) for name in names}
        losses, was_clipped = value_losses(predicted, blank["values"], blank["returns"], clip=self.clip)
        loss = (losses * blank["loss_weights"]).sum()
        count = mask.sum().to(losses.dtype)
        return loss, {
            "critic/vf_loss": (loss.detach(), blank["loss_weights"].sum()),
            "critic/vf_clipfrac": (was_clipped.sum(), count),
            "critic/vpred_mean": (predicted.detach().sum(), count),
        }
