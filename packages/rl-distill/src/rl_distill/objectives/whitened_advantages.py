"""Advantages that are whitened over the tokens of the global batch: REINFORCE++, its baseline form, GDPO.

A batch-wide mean is subtracted last, so a row's advantage depends on the whole batch: compute them before it is cut.

Source: REINFORCE++, Hu et al. 2025, arXiv:2501.03262; GDPO, Liu et al. 2026, arXiv:2601.05242.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_core.errors import DataError, SettingsError
from rl_distill.objectives.advantages import dr_grpo_advantages, grpo_advantages
from rl_distill.objectives.ragged import discounted_sums, spread_rows
from rl_distill.objectives.rewarded_rows import (
    RewardedRows,
    episodes_of,
    units_of,
    unmasked,
)
from rl_distill.objectives.whitening import masked_whiten

COMPONENT = "reward/"
"""Row columns `reward/NAME` are the named components of the reward."""


def reinforce_plus_plus(rows: RewardedRows, *, gamma: float = 1.0) -> dict[str, Tensor]:
    """REINFORCE++: discounted returns of each token, whitened over the batch.

    Args:
        rows: The batch; each trajectory is an episode that ends with its session's reward.
        gamma: Discount for each trained token, in [0, 1].

    Returns:
        `advantages` and `returns` [T].

    Raises:
        SettingsError: gamma is outside [0, 1].
    """
    check_discounts(gamma=gamma)
    episodes = episodes_of(rows)
    returns = discounted_sums(episodes.rewards, episodes.offsets, discount=gamma)
    whitened = masked_whiten(returns, torch.ones_like(returns, dtype=torch.bool))
    return {"advantages": unmasked(whitened * episodes.share, rows), "returns": unmasked(returns, rows)}


def reinforce_plus_plus_baseline(rows: RewardedRows) -> dict[str, Tensor]:
    """REINFORCE++ with the group's mean as baseline, whitened over the batch."""
    units = units_of(rows)
    return {"advantages": _whitened_by_session(rows, dr_grpo_advantages(units.rewards, units.group))}


def gdpo(rows: RewardedRows, *, weights: Mapping[str, float] | None = None, eps: float = 1e-6) -> dict[str, Tensor]:
    """GDPO: GRPO of each reward component by itself, their weighted sum whitened over the batch.

    Args:
        rows: The batch with a row column `reward/NAME` for each component.
        weights: Weight of each component that counts; None takes all of the batch, each once.
        eps: Added to a group's standard deviation.

    Raises:
        DataError: There are no components, or one of `weights` is missing.
    """
    if weights is None:
        found = sorted(name for name in rows.row_columns if name.startswith(COMPONENT))
        weights = {name.removeprefix(COMPONENT): 1.0 for name in found}
    if not weights:
        raise DataError(
            "gdpo needs the components of the reward as row columns 'reward/NAME'; the batch has none. Let the reward "
            'function return them by name, or set advantage = "grpo".'
        )
    parts = []
    for name, weight in weights.items():
        units = units_of(rows, rows.row_column(COMPONENT + name))
        parts.append(weight * grpo_advantages(units.rewards.double(), units.group, eps=eps))
    return {"advantages": _whitened_by_session(rows, torch.stack(parts).sum(0))}


def check_discounts(**discounts: float) -> None:
    """Refuse discounts outside [0, 1].

    Raises:
        SettingsError: Names the first.
    """
    for name, value in discounts.items():
        if not 0.0 <= value <= 1.0:
            raise SettingsError(f"{name} must be in [0, 1]; found {value}.")


def _whitened_by_session(rows: RewardedRows, advantages: Tensor) -> Tensor:
    """[T] advantages of units [U], whitened over the trained tokens before each trajectory gets its share."""
    units = units_of(rows)
    of_tokens = spread_rows(advantages.double()[units.of_row], rows.offsets, num_tokens=len(rows.loss_mask))
    share = spread_rows(units.share.double(), rows.offsets, num_tokens=len(rows.loss_mask))
    whitened = masked_whiten(of_tokens, rows.loss_mask) * share
    return whitened.to(rows.rewards.dtype)
