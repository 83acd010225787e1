"""Advantages whitened over the tokens of the global batch: REINFORCE++, its baseline variant, GDPO.

The last step subtracts a mean over the batch, so compute these advantages before the batch is split.

Source: REINFORCE++, Hu et al. 2025, arXiv:2501.03262; GDPO, Liu et al. 2026, arXiv:2601.05242.
"""

from collections.abc import Mapping
from typing import Annotated

import torch
from annotated_types import MinLen
from torch import Tensor

from rl_core.errors import DataError
from rl_core.record_fields import FiniteFloat, NonNegativeFloat, UnitFloat, converts_arguments
from rl_distill.objectives.advantages import dr_grpo_advantages, grpo_advantages
from rl_distill.objectives.ragged import discounted_sums, spread_rows
from rl_distill.objectives.rewarded_rows import RewardedRows, episodes_of, units_of, unmasked
from rl_distill.objectives.whitening import masked_whiten

COMPONENT = "reward/"
"""Prefix of the row columns `reward/NAME`, the named components of the reward."""


ComponentWeights = Annotated[Mapping[str, FiniteFloat], MinLen(1)] | None
"""Weight of each component of the reward."""


@converts_arguments
def reinforce_plus_plus(rows: RewardedRows, *, gamma: UnitFloat = 1.0) -> dict[str, Tensor]:
    """REINFORCE++: discounted returns of each token, whitened over the batch.

    Args:
        rows: The batch; each trajectory is an episode that ends with its session's reward.
        gamma: Discount per trained token, in [0, 1].

    Returns:
        `advantages` and `returns` [T].

    Raises:
        SettingsError: gamma is outside [0, 1].
    """
    rewards, offsets, share = episodes_of(rows)
    returns = discounted_sums(rewards, offsets, discount=gamma)
    whitened = masked_whiten(returns, torch.ones_like(returns, dtype=torch.bool))
    return {"advantages": unmasked(whitened * share, rows), "returns": unmasked(returns, rows)}


@converts_arguments
def reinforce_plus_plus_baseline(rows: RewardedRows) -> dict[str, Tensor]:
    """REINFORCE++ with the group's mean as baseline, whitened over the batch."""
    units = units_of(rows)
    return {"advantages": _whitened_by_session(rows, dr_grpo_advantages(units.rewards, units.group))}


@converts_arguments
def gdpo(rows: RewardedRows, *, weights: ComponentWeights = None, eps: NonNegativeFloat = 1e-6) -> dict[str, Tensor]:
    """GDPO: the weighted sum of each reward component's GRPO advantages, whitened over the batch.

    Args:
        rows: The batch with a row column `reward/NAME` per component.
        weights: Weight of each component to include; None includes all components with weight 1.
        eps: Added to a group's standard deviation.

    Raises:
        SettingsError: A weight is not a finite number, or eps is below 0.
        DataError: The batch has no components, or lacks one of `weights`.
    """
    if weights is None:
        found = sorted(name for name in rows.row_columns if name.startswith(COMPONENT))
        weights = {name.removeprefix(COMPONENT): 1.0 for name in found}
    if not weights:
        raise DataError(
            "gdpo needs the components of the reward as row columns 'reward/NAME'; the batch has none. Return them "
            'by name from the reward function, or set advantage = "grpo".'
        )
    parts = []
    for name, weight in weights.items():
        units = units_of(rows, rows.row_column(COMPONENT + name))
        parts.append(weight * grpo_advantages(units.rewards.double(), units.group, eps=eps))
    return {"advantages": _whitened_by_session(rows, torch.stack(parts).sum(0))}


def _whitened_by_session(rows: RewardedRows, advantages: Tensor) -> Tensor:
    """Spread advantages of units [U] to tokens [T], and whiten them over trained tokens before the shares apply."""
    units = units_of(rows)
    of_tokens = spread_rows(advantages.double()[units.of_row], rows.offsets, num_tokens=len(rows.loss_mask))
    share = spread_rows(units.share.double(), rows.offsets, num_tokens=len(rows.loss_mask))
    whitened = masked_whiten(of_tokens, rows.loss_mask) * share
    return whitened.to(rows.rewards.dtype)
