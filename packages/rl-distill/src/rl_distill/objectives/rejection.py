"""Rejection of tokens or trajectories on which engine and learner differ too much.

A criterion is a statistic of per-token estimates of KL(rollout || old): k1 = log(rollout / old), k2 = k1^2 / 2 and k3 =
old / rollout - 1 - log(old / rollout). It uses a token's own estimate, or the sum, mean or maximum over its trajectory.

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; Liu et al. 2025, "When speed kills stability",
https://richardli.xyz/rl-collapse; criterion names follow verl.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rl_core.errors import SettingsError
from rl_core.registry import Registry
from rl_distill.objectives.correction import blank_masked
from rl_distill.objectives.kl import bounded, excess
from rl_distill.objectives.ragged import row_counts, row_maxima, row_means, row_sums, spread_rows

Bound = float | tuple[float, float]
"""Limits of a criterion.

For k1 criteria, (low, high) limits of exp(statistic), where one number x stands for (1 / x, x). For k2 and k3 criteria,
the maximum of the statistic.
"""

TokenStatistic = Callable[[Tensor], Tensor]
"""log(old / rollout) [T] -> estimates [T]."""

RowStatistic = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(estimates [T], mask [T], offsets [N + 1]) -> statistic [N]."""


def _k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _sums(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    return row_sums(torch.where(mask, values, torch.zeros_like(values)), offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """A statistic by which tokens or trajectories are rejected.

    Attributes:
        of_token: Computes each token's estimate.
        of_row: Computes each trajectory's statistic from its tokens' estimates; None to judge each token separately.
        is_signed: Whether the statistic has either sign (k1), and thus two limits.
    """

    of_token: TokenStatistic
    of_row: RowStatistic | None
    is_signed: bool


_TOKEN = {"k1": _k1, "k2": _k2, "k3": excess}
_ROW: dict[str, RowStatistic] = {"seq_sum": _sums, "seq_mean": row_means, "seq_max": row_maxima}

REJECTION_CRITERIA: Registry[Criterion] = Registry(
    "rejection criterion",
    {
        **{f"token_{k}": Criterion(of_token=f, of_row=None, is_signed=k == "k1") for k, f in _TOKEN.items()},
        **{
            f"{level}_{k}": Criterion(of_token=of_token, of_row=of_row, is_signed=k == "k1")
            for level, of_row in _ROW.items()
            for k, of_token in _TOKEN.items()
            if (level, k) != ("seq_max", "k1")
        },
    },
    group="rl_distill.rejection_criteria",
)
"""token_k1, token_k2 and token_k3, and the same for seq_sum, seq_mean and seq_max.

There is no seq_max_k1, since a maximum would see only one sign.
"""


def _judge(
    log_ratio: Tensor, loss_mask: Tensor, offsets: Tensor, *, criterion: Criterion, bound: Bound
) -> tuple[Tensor, dict[str, Tensor]]:
    """Apply one criterion; return a mask [T] of the tokens that pass, and its metrics."""
    low, high = rejection_limits(bound, is_signed=criterion.is_signed)
    values = criterion.of_token(bounded(blank_masked(log_ratio, loss_mask, offsets)))
    values = torch.where(loss_mask, values, torch.zeros_like(values))
    if criterion.of_row is None:
        statistic, of_rows = values, row_means(values, loss_mask, offsets)
    else:
        of_rows = criterion.of_row(values, loss_mask, offsets)
        statistic = spread_rows(of_rows, offsets, num_tokens=len(values))
    passes = (statistic <= high) & (statistic >= low)
    of_tokens, of_rows = statistic[loss_mask], of_rows[row_counts(loss_mask, offsets) > 0]
    judged = of_tokens if criterion.of_row is None else of_rows
    return passes, _statistics(of_tokens, of_rows, judged, low=low, high=high) if len(of_tokens) else {}


def rejection_limits(bound: Bound, *, is_signed: bool) -> tuple[float, float]:
    """Return the minimum and maximum of the statistic that pass; the minimum is -inf for k2 and k3.

    Raises:
        SettingsError: A limit is not above 0, low is above high, or a k2 or k3 criterion has two limits.
    """
    parts: tuple[Any, ...] = tuple(bound) if isinstance(bound, tuple | list) else (bound,)
    is_positive = all(isinstance(part, Real) and not isinstance(part, bool) and part > 0 for part in parts)
    if not is_signed:
        if len(parts) != 1 or not is_positive:
            raise SettingsError(f"the bound of a k2 or k3 criterion must be one number above 0; found {bound!r}.")
        return -math.inf, float(parts[0])
    if is_positive and len(parts) == 1:
        parts = (1.0 / parts[0], parts[0])
    if not is_positive or len(parts) != 2 or not 0.0 < parts[0] <= parts[1] < math.inf:
        raise SettingsError(
            "the bound of a k1 criterion must be (low, high) on rollout / old with 0 < low <= high < inf, or one "
            f"number x >= 1 for (1 / x, x); found {bound!r}."
        )
    return math.log(parts[0]), math.log(parts[1])


def rejection_mask(
    log_ratio: Tensor, loss_mask: Tensor, offsets: Tensor, *, bounds: Mapping[str, Bound]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a mask of the tokens that pass all criteria, and metrics.

    Args:
        log_ratio: [T] old_logprobs - rollout_logprobs; masked values are ignored.
        loss_mask: [T] bool of the global batch.
        offsets: [N + 1] int64 row offsets.
        bounds: Bound of each criterion by its name in `REJECTION_CRITERIA`.

    Returns:
        [T] bool mask, True only where loss_mask is; and scalars by name, `rollout_corr/rollout_rs_{criterion}_*` and
        `rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction}`, or {} if no token trains.

    Raises:
        ShapeError: The shapes or dtypes do not match.
        SettingsError: A criterion is unknown, or a bound is invalid.
    """
    keep, metrics = loss_mask, dict[str, Tensor]()
    for name, bound in bounds.items():
        criterion = REJECTION_CRITERIA.get(name)
        passes, statistics = _judge(log_ratio, loss_mask, offsets, criterion=criterion, bound=bound)
        keep = keep & passes
        prefix = f"rollout_corr/rollout_rs_{name}"
        metrics |= {f"{prefix}_{key}": value for key, value in statistics.items()}
        metrics |= _masked_fractions(prefix, loss_mask & passes, loss_mask, offsets)
    metrics |= _masked_fractions("rollout_corr/rollout_rs", keep, loss_mask, offsets)
    return keep, metrics if bool(loss_mask.any()) else {}


def _statistics(of_tokens: Tensor, of_rows: Tensor, judged: Tensor, *, low: float, high: float) -> dict[str, Tensor]:
    """Return metrics of a statistic over trained tokens and trajectories; `judged` is the level that is rejected."""
    is_signed = low > -math.inf
    statistics = {
        "mean": of_tokens.mean(),
        "max": judged.max(),
        "min": judged.min(),
        "fraction_high": (judged > high).float().mean(),
        "fraction_low": (judged < low).float().mean(),
        "std": of_tokens.clamp(min=low if is_signed else 0.0, max=high).double().std(correction=0).to(of_tokens.dtype),
        "seq_mean": of_rows.mean(),
        "seq_std": of_rows.std() if len(of_rows) > 1 else of_rows.new_zeros(()),
        "seq_max": of_rows.max(),
        "seq_min": of_rows.min(),
        "seq_max_deviation": of_rows.abs().max(),
        "seq_fraction_high": (of_rows > high).float().mean(),
    }
    return statistics | ({"seq_fraction_low": (of_rows < low).float().mean()} if is_signed else {})


def _masked_fractions(prefix: str, keep: Tensor, loss_mask: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    """Return the shares of rejected tokens, and of trajectories with a rejected token."""
    if not bool(loss_mask.any()):
        return {}
    rejected = row_counts(loss_mask & ~keep, offsets)[row_counts(loss_mask, offsets) > 0]
    return {
        f"{prefix}_masked_fraction": (~keep[loss_mask]).float().mean(),
        f"{prefix}_seq_masked_fraction": (rejected > 0).float().mean(),
    }
