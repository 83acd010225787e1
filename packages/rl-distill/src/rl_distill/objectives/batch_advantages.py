"""Advantages whitened over the tokens of the global batch, or against a baseline from outside the group.

GAE compares with a critic's values, ReMax with a greedy response, the optimal token baseline with the group's returns
at the same token. REINFORCE++, its baseline variant and GDPO subtract a
mean over the batch, so compute these advantages before the batch is split.

Source: GAE, Schulman et al. 2015, arXiv:1506.02438; ReMax, Li et al. 2023, arXiv:2310.10505; REINFORCE++, Hu et al.
2025, arXiv:2501.03262; GDPO, Liu et al. 2026, arXiv:2601.05242; OTB, Li et al. 2026, arXiv:2602.07078.
"""

from collections.abc import Mapping
from typing import Annotated

import torch
from annotated_types import MinLen
from torch import Tensor

from rl_core.data import are_equal_rewards
from rl_core.errors import DataError
from rl_core.record_fields import FiniteFloat, NonNegativeFloat, UnitFloat, converts_arguments
from rl_distill.objectives.advantages import dr_grpo_advantages, grpo_advantages
from rl_distill.objectives.ragged import discounted_sums, next_values, row_index, spread_rows
from rl_distill.objectives.rewarded_rows import RewardedRows, episodes_of, spread_units, units_of, unmasked
from rl_distill.objectives.shapes import check_mask, check_tokens


@converts_arguments
def masked_whiten(values: Tensor, mask: Tensor, *, eps: NonNegativeFloat = 1e-8) -> Tensor:
    """Normalize values to mean 0 and variance 1 over the tokens in the mask.

    Args:
        values: [T] float over the whole global batch; masked values are ignored.
        mask: [T] bool.
        eps: Added to the unbiased variance.

    Returns:
        [T] in the values' dtype, computed in float64, 0 where masked. Equal values or a single value become 0.

    Raises:
        ShapeError: The shapes or dtypes do not match.
        SettingsError: eps is below 0.
    """
    check_tokens({"values": values, "mask": mask})
    check_mask(mask)
    kept = values[mask].double()
    if len(kept) == 0:
        return torch.zeros_like(values)
    is_equal = are_equal_rewards(kept.min(), kept.max())
    centered = kept - kept.mean()
    variance = centered.square().sum() / max(len(kept) - 1, 1)
    whitened = torch.where(is_equal, torch.zeros_like(kept), centered * (variance + eps).rsqrt())
    return torch.zeros_like(values).masked_scatter(mask, whitened.to(values.dtype))


@converts_arguments
def gae(rows: RewardedRows, *, gamma: UnitFloat = 1.0, lam: UnitFloat = 1.0, whiten: bool = True) -> dict[str, Tensor]:
    """Generalized advantage estimation over the trained tokens of each trajectory.

    Untrained tokens are skipped: the next trained token is the next step.

    Args:
        rows: The batch with the token column `values`; values[t] is the critic's value of the state before token t.
            Each trajectory is an episode that ends with its session's reward.
        gamma: Discount per trained token, in [0, 1].
        lam: GAE's lambda, in [0, 1]: 0 bootstraps from the next value, 1 uses only the rewards.
        whiten: Whiten the advantages, but not the returns, over the batch.

    Returns:
        `advantages` and `returns` [T]. Returns are the critic's targets: advantages before whitening, plus values.

    Raises:
        SettingsError: gamma or lam is outside [0, 1].
        DataError: `values` is missing.
    """
    rewards, offsets, share = episodes_of(rows)
    values = rows.column("values")[rows.loss_mask].double()
    errors = rewards + gamma * next_values(values, offsets) - values
    advantages = discounted_sums(errors, offsets, discount=gamma * lam)
    returns = advantages + values
    if whiten:
        advantages = masked_whiten(advantages, torch.ones_like(advantages, dtype=torch.bool))
    return {"advantages": unmasked(advantages * share, rows), "returns": unmasked(returns, rows)}


@converts_arguments
def remax(rows: RewardedRows) -> dict[str, Tensor]:
    """ReMax: the reward minus the reward of a greedy response to the same prompt.

    Args:
        rows: The batch with the row column `reward_baseline`, the reward of a greedy response to the prompt.

    Raises:
        DataError: `reward_baseline` is missing or not finite.
    """
    units = units_of(rows, rows.total_rewards() - rows.row_column("reward_baseline"))
    return {"advantages": spread_units(rows, units, units.rewards)}


ENERGY_FLOOR = 1e-8
"""Added to a sum of energies before it divides, as in verl."""


@converts_arguments
def optimal_token_baseline(rows: RewardedRows) -> dict[str, Tensor]:
    """OTB: the return from each token minus the baseline of least variance for this token's place in its group.

    The baseline of trained token t is sum(G[t] * W[t]) / sum(W[t]) over the group's trajectories that reach it. G[t] is
    the return from it, and the energy W[t] is the sum of 1 - 2 * p + sum_pi_squared over the trained tokens up to it,
    with their probabilities p. A token that no other trajectory reaches has baseline 0, as in verl.

    Args:
        rows: The batch with the token columns `old_logprobs` and `sum_pi_squared`. Each trajectory is an episode that
            ends with its session's reward. `correction_weights`, if present, multiply the energies by their square.

    Raises:
        DataError: A column is missing.
    """
    rewards, offsets, share = episodes_of(rows)
    returns = discounted_sums(rewards, offsets, discount=1.0)
    energy = 1 - 2 * rows.column("old_logprobs").double().exp() + rows.column("sum_pi_squared").double()
    if "correction_weights" in rows.columns:
        energy = energy * rows.column("correction_weights").double().square()
    row = row_index(offsets, num_tokens=len(returns))
    total = energy[rows.loss_mask].cumsum(0)
    realized = total - torch.cat([total.new_zeros(1), total])[offsets[row]]
    place = torch.stack([rows.group[row], torch.arange(len(row), device=row.device) - offsets[row]])
    _, index, count = torch.unique(place, dim=1, return_inverse=True, return_counts=True)
    zeros = realized.new_zeros(len(count))
    weighted, weights = zeros.index_add(0, index, returns * realized), zeros.index_add(0, index, realized)
    baselines = torch.where(count > 1, weighted / (weights + ENERGY_FLOOR), 0.0)
    return {"advantages": unmasked((returns - baselines[index]) * share, rows)}


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
