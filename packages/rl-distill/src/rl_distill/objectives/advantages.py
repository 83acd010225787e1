"""Advantages from rewards compared within the group of one prompt.

Each advantage is a function of sessions, (rewards [S], group [S]) -> [S], with an estimator that spreads its result to
tokens. A session alone in its group gets 0.

Source: GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1; Dr. GRPO, Liu et al. 2025, arXiv:2503.20783; RLOO,
Ahmadian et al. 2024, arXiv:2402.14740; OPO, Hao et al. 2025, arXiv:2505.23585; GPG, Chu et al. 2025,
arXiv:2504.02546; pass@k, Tang et al. 2025, arXiv:2503.19595; Lite PPO, Liu et al. 2025, arXiv:2508.08221, section 5;
MaxRL, Tajwar et al. 2026, arXiv:2602.02710, algorithm 1.
"""

from functools import partial

import torch
from torch import Tensor

from rl_core.data import are_equal_rewards
from rl_core.errors import ShapeError
from rl_core.record_fields import NonNegativeFloat, converts_arguments
from rl_distill.objectives.rewarded_rows import RewardedRows, session_advantages, spread_units, units_of
from rl_distill.objectives.shapes import check_rows


@converts_arguments
def grpo(rows: RewardedRows, *, eps: NonNegativeFloat = 1e-6) -> dict[str, Tensor]:
    """GRPO: apply `grpo_advantages` to sessions; each trained token gets its session's advantage."""
    return {"advantages": session_advantages(rows, partial(grpo_advantages, eps=eps))}


@converts_arguments
def dr_grpo(rows: RewardedRows) -> dict[str, Tensor]:
    """Dr. GRPO: apply `dr_grpo_advantages` to sessions; each trained token gets its session's advantage."""
    return {"advantages": session_advantages(rows, dr_grpo_advantages)}


@converts_arguments
def rloo(rows: RewardedRows) -> dict[str, Tensor]:
    """RLOO: apply `rloo_advantages` to sessions; each trained token gets its session's advantage."""
    return {"advantages": session_advantages(rows, rloo_advantages)}


@converts_arguments
def opo(rows: RewardedRows) -> dict[str, Tensor]:
    """OPO: apply `opo_advantages` to sessions; each trained token gets its session's advantage."""
    units = units_of(rows)
    return {"advantages": spread_units(rows, units, opo_advantages(units.rewards, units.group, units.num_tokens))}


@converts_arguments
def gpg(rows: RewardedRows, *, divide_by_std: bool = False, eps: NonNegativeFloat = 1e-6) -> dict[str, Tensor]:
    """GPG: apply `gpg_advantages` to sessions; each trained token gets its session's advantage."""
    estimate = partial(gpg_advantages, divide_by_std=divide_by_std, eps=eps)
    return {"advantages": session_advantages(rows, estimate)}


@converts_arguments
def grpo_passk(rows: RewardedRows, *, divide_by_std: bool = True, eps: NonNegativeFloat = 1e-6) -> dict[str, Tensor]:
    """GRPO for pass@k: apply `passk_advantages` to sessions; each trained token gets its session's advantage."""
    estimate = partial(passk_advantages, divide_by_std=divide_by_std, eps=eps)
    return {"advantages": session_advantages(rows, estimate)}


@converts_arguments
def lite_ppo(rows: RewardedRows, *, eps: NonNegativeFloat = 1e-6) -> dict[str, Tensor]:
    """Lite PPO: apply `lite_ppo_advantages` to sessions; each trained token gets its session's advantage."""
    return {"advantages": session_advantages(rows, partial(lite_ppo_advantages, eps=eps))}


@converts_arguments
def maxrl(rows: RewardedRows) -> dict[str, Tensor]:
    """MaxRL: apply `maxrl_advantages` to sessions; each trained token gets its session's advantage."""
    return {"advantages": session_advantages(rows, maxrl_advantages)}


@converts_arguments
def grpo_advantages(rewards: Tensor, group: Tensor, *, eps: NonNegativeFloat = 1e-6) -> Tensor:
    """Center rewards within their group and divide them by its standard deviation.

    Args:
        rewards: [S] float, one for each session.
        group: [S] int64 prompt of each session; groups may differ in size.
        eps: Added to the unbiased standard deviation.

    Returns:
        [S] advantages in the rewards' dtype, or torch's default dtype for integers. A group with equal rewards or one
        session gets zeros.

    Raises:
        ShapeError: An argument is not [S], or group has a float dtype.
        SettingsError: eps is below 0.
    """
    centered, index = _centered(rewards, group)
    return (centered / _scales(centered, index, eps=eps)[index]).to(_dtype(rewards))


@converts_arguments
def dr_grpo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Center rewards within their group; see `grpo_advantages` for arguments and result."""
    return _centered(rewards, group)[0].to(_dtype(rewards))


@converts_arguments
def rloo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Subtract the mean of the group's other rewards; see `grpo_advantages` for arguments and result."""
    centered, index = _centered(rewards, group)
    sizes = torch.bincount(index)
    # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
    return (centered * (sizes / (sizes - 1).clamp(min=1))[index]).to(_dtype(rewards))


@converts_arguments
def opo_advantages(rewards: Tensor, group: Tensor, num_tokens: Tensor) -> Tensor:
    """Subtract the group's length-weighted mean reward, the minimum-variance baseline if gradients grow with length.

    Args:
        rewards: [S] float, one for each session.
        group: [S] int64 prompt of each session.
        num_tokens: [S] int64 trained tokens of each session.

    Returns:
        [S] advantages in the rewards' dtype. A group with equal rewards or one session gets zeros.

    Raises:
        ShapeError: An argument is not [S].
    """
    check_rows({"rewards": rewards, "num_tokens": num_tokens})
    centered, index = _centered(rewards, group)
    weights = num_tokens.double()
    totals = weights.new_zeros(len(torch.bincount(index)))
    lengths = totals.index_add(0, index, weights).clamp(min=1)
    # Averaging centered rewards keeps the zeros of equal rewards exact.
    baselines = totals.index_add(0, index, weights * centered) / lengths
    return (centered - baselines[index]).to(_dtype(rewards))


@converts_arguments
def gpg_advantages(
    rewards: Tensor, group: Tensor, *, divide_by_std: bool = False, eps: NonNegativeFloat = 1e-6
) -> Tensor:
    """Center rewards within their group, and scale them up to make up for groups with equal rewards.

    Args:
        rewards: [S] float, one for each session.
        group: [S] int64 prompt of each session.
        divide_by_std: Also divide by the group's standard deviation (the paper's F_norm).
        eps: Added to the standard deviation.

    Returns:
        [S] advantages in the rewards' dtype. The scale is the number of all sessions divided by the number of those in
        groups with unequal rewards.

    Raises:
        ShapeError: An argument is not [S], or group has a float dtype.
        SettingsError: eps is below 0.
    """
    centered, index = _centered(rewards, group)
    teaches = centered.new_zeros(len(torch.bincount(index))).index_add(0, index, centered.abs()) > 0
    alpha = len(rewards) / teaches[index].sum().clamp(min=1)
    scale = _scales(centered, index, eps=eps)[index] if divide_by_std else 1.0
    return (alpha * centered / scale).to(_dtype(rewards))


@converts_arguments
def passk_advantages(
    rewards: Tensor, group: Tensor, *, divide_by_std: bool = True, eps: NonNegativeFloat = 1e-6
) -> Tensor:
    """Give the best session of a group its lead over the second best, and all others 0.

    Args:
        rewards: [S] float, one for each session.
        group: [S] int64 prompt of each session.
        divide_by_std: Divide by the group's standard deviation.
        eps: Added to the standard deviation.

    Returns:
        [S] advantages in the rewards' dtype. A session alone in its group gets 0, and so do all if the best is tied.

    Raises:
        ShapeError: An argument is not [S], or group has a float dtype.
        SettingsError: eps is below 0.
    """
    centered, index = _centered(rewards, group)
    sizes = torch.bincount(index)
    floor = torch.full((len(sizes),), -torch.inf, dtype=torch.float64, device=index.device)
    best = floor.scatter_reduce(0, index, centered, "amax")
    is_best = centered == best[index]
    second = floor.scatter_reduce(0, index, torch.where(is_best, -torch.inf, centered), "amax")
    num_best = torch.zeros_like(sizes).index_add(0, index, is_best.long())
    lead = torch.where((num_best == 1) & (sizes > 1), best - second, torch.zeros_like(best))
    scale = _scales(centered, index, eps=eps) if divide_by_std else torch.ones_like(lead)
    return torch.where(is_best, (lead / scale)[index], torch.zeros_like(centered)).to(_dtype(rewards))


@converts_arguments
def lite_ppo_advantages(rewards: Tensor, group: Tensor, *, eps: NonNegativeFloat = 1e-6) -> Tensor:
    """Center rewards within their group, and divide them by the standard deviation of the batch's rewards.

    advantage = (reward - mean of the group) / (standard deviation of all rewards + eps). In a group whose rewards are
    almost equal, small differences are not scaled up, as GRPO does.

    Args:
        rewards: [S] float, one for each session of the global batch.
        group: [S] int64 prompt of each session; groups may differ in size.
        eps: Added to the unbiased standard deviation.

    Returns:
        [S] advantages in the rewards' dtype. A group with equal rewards or one session gets zeros.

    Raises:
        ShapeError: An argument is not [S], or group has a float dtype.
        SettingsError: eps is below 0.
    """
    centered, _ = _centered(rewards, group)
    deviation = rewards.double().std() if len(rewards) > 1 else centered.new_zeros(())
    return (centered / torch.where(deviation > 0, deviation + eps, 1.0)).to(_dtype(rewards))


@converts_arguments
def maxrl_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Center rewards within their group, and divide them by the group's mean.

    advantage = (reward - mean) / mean. With rewards of 0 and 1 this is the gradient of the log-likelihood of success,
    cut after as many terms as the group has sessions, instead of the gradient of the success rate: groups that rarely
    succeed weigh more.

    Args:
        rewards: [S] float, at least 0, one for each session.
        group: [S] int64 prompt of each session; groups may differ in size.

    Returns:
        [S] advantages in the rewards' dtype. A group whose mean is not above 0 gets zeros, as in the paper for a group
        without success; so does a group with equal rewards or one session.

    Raises:
        ShapeError: An argument is not [S], or group has a float dtype.
    """
    centered, index = _centered(rewards, group)
    sizes = torch.bincount(index)
    means = (centered.new_zeros(len(sizes)).index_add(0, index, rewards.double()) / sizes)[index]
    return torch.where(means > 0, centered / means, 0.0).to(_dtype(rewards))


def _dtype(rewards: Tensor) -> torch.dtype:
    """Return the rewards' dtype; torch's default dtype for integers and booleans."""
    return rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()


def _centered(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Return [S] float64 rewards minus their group's mean, and [S] dense group indices."""
    check_rows({"rewards": rewards, "group": group})
    if len(group) and group.is_floating_point():
        raise ShapeError(
            f"group must be integer prompt indices, one per session; found {group.dtype}. Are rewards and group "
            "swapped?"
        )
    _, index = torch.unique(group, return_inverse=True)
    values, sizes = rewards.double(), torch.bincount(index)
    zeros = values.new_zeros(len(sizes))
    means = zeros.index_add(0, index, values) / sizes
    lowest = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    is_equal = are_equal_rewards(lowest, highest)[index]
    return torch.where(is_equal, torch.zeros_like(values), values - means[index]), index


def _scales(centered: Tensor, index: Tensor, *, eps: float) -> Tensor:
    """Return [G] unbiased standard deviation of each group plus eps; 1 where it is 0."""
    sizes = torch.bincount(index)
    squares = centered.new_zeros(len(sizes)).index_add(0, index, centered.square())
    deviations = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return torch.where(deviations > 0, deviations + eps, 1.0)
