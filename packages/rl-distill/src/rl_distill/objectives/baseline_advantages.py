"""Advantages against a baseline from outside the group: a critic's values (GAE), or a greedy response (ReMax).

Source: GAE, Schulman et al. 2015, arXiv:1506.02438; ReMax, Li et al. 2023, arXiv:2310.10505.
"""

import torch
from torch import Tensor

from rl_core.record_fields import UnitFloat, converts_arguments
from rl_distill.objectives.ragged import discounted_sums, next_values
from rl_distill.objectives.rewarded_rows import RewardedRows, episodes_of, spread_units, units_of, unmasked
from rl_distill.objectives.whitening import masked_whiten


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
