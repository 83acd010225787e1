"""The mismatch between the engine's and the learner's probabilities: its metrics, and weights that correct it.

Metric names follow verl.

Source: truncated importance sampling, Ionides 2008, doi:10.1198/106186008X320456; for an engine's mismatch,
Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; banded masking, IcePop, Ling team 2025, arXiv:2510.18855;
effective sample size, Kong 1992.
"""

from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from rl_core.errors import SettingsError
from rl_core.record_fields import PositiveFloat, converts_arguments
from rl_distill.objectives.kl import bounded, excess
from rl_distill.objectives.ragged import row_counts, row_means, row_sums, spread_rows
from rl_distill.objectives.shapes import check_mask, check_offsets, check_tokens

CorrectionLevel = Literal["token", "sequence"]
"""Scope of an importance ratio: token (biased, low variance) or trajectory (unbiased, high variance)."""

WeightCap = Annotated[float, Gt(0)]
"""Maximum importance weight."""

WeightFloor = PositiveFloat
"""Minimum importance weight; smaller ones become 0."""


@converts_arguments
def importance_weights(
    log_ratio: Tensor,
    loss_mask: Tensor,
    offsets: Tensor,
    *,
    level: CorrectionLevel,
    cap: WeightCap = 2.0,
    floor: WeightFloor | None = None,
) -> Tensor:
    """Return importance weights old / rollout, truncated from above or, with a floor, 0 outside a band (IcePop).

    Args:
        log_ratio: [T] old_logprobs - rollout_logprobs; masked values are ignored.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 row offsets.
        level: "token", or "sequence" for the product over each trajectory's trained tokens.
        cap: Maximum weight. Larger weights become `cap`, or 0 if `floor` is set.
        floor: Minimum weight; smaller weights become 0. None only truncates from above.

    Returns:
        [T] weights without gradient, 0 where masked. Loss weights stay unchanged, so tokens outside a band still count
        in means.

    Raises:
        ShapeError: The shapes or dtypes do not match.
        SettingsError: The level is unknown, a bound is not above 0, or floor is above cap.
    """
    if floor is not None and floor > cap:
        raise SettingsError(f"importance_weights needs floor <= cap; found floor = {floor}, cap = {cap}.")
    weights = importance_ratios(log_ratio, loss_mask, offsets, level=level)
    if floor is None:
        return weights.clamp(max=cap)
    return torch.where((weights >= floor) & (weights <= cap), weights, torch.zeros_like(weights))


@converts_arguments
def importance_ratios(log_ratio: Tensor, loss_mask: Tensor, offsets: Tensor, *, level: CorrectionLevel) -> Tensor:
    """Return [T] unbounded importance ratios old / rollout; see `importance_weights`."""
    log_ratio = blank_masked(log_ratio, loss_mask, offsets)
    if level == "sequence":
        log_ratio = spread_rows(row_sums(log_ratio, offsets), offsets, num_tokens=len(log_ratio))
    ratios = bounded(log_ratio).exp()
    return torch.where(loss_mask, ratios, torch.zeros_like(ratios))


def blank_masked(values: Tensor, loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """Check values [T], and return them without gradient, 0 where masked.

    Raises:
        ShapeError: The values are not [T], or the mask or offsets do not match.
    """
    num_tokens = check_tokens({"logprobs": values, "loss_mask": loss_mask})
    check_mask(loss_mask)
    check_offsets(offsets, num_tokens=num_tokens)
    return torch.where(loss_mask, values, torch.zeros_like(values)).detach()


def mismatch_sums(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, offsets: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Measure how the engine's logprobs differ from the learner's, as sums over tokens and trajectories.

    Args:
        old_logprobs: [T] the learner's logprobs.
        rollout_logprobs: [T] the engine's logprobs.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 row offsets.

    Returns:
        (weighted sum, weight) by metric name. Over tokens: `training/rollout_probs_diff_mean`, `rollout_corr/kl` (of
        the engine to the learner), `k3_kl`, `chi2_token`. Over trajectories with a trained token, from their mean
        logprobs: `training_ppl`, `training_log_ppl`, `rollout_ppl`, `rollout_log_ppl`, `log_ppl_diff`,
        `log_ppl_abs_diff`, `ppl_ratio`, and `chi2_seq`.

    Raises:
        ShapeError: The shapes or dtypes do not match.
    """
    old = blank_masked(old_logprobs, loss_mask, offsets)
    rollout = blank_masked(rollout_logprobs, loss_mask, offsets)
    counts = row_counts(loss_mask, offsets)
    log_ratio = bounded(old - rollout)
    of_tokens = {
        "training/rollout_probs_diff_mean": (old.exp() - rollout.exp()).abs(),
        "rollout_corr/kl": rollout - old,
        "rollout_corr/k3_kl": excess(log_ratio),
        "rollout_corr/chi2_token": torch.expm1(2.0 * log_ratio),
    }
    training_log_ppl = -row_sums(old, offsets) / counts  # NaN without a token, which no sum counts
    rollout_log_ppl = -row_sums(rollout, offsets) / counts
    difference = training_log_ppl - rollout_log_ppl
    of_rows = {
        "rollout_corr/training_ppl": training_log_ppl.exp(),
        "rollout_corr/training_log_ppl": training_log_ppl,
        "rollout_corr/rollout_ppl": rollout_log_ppl.exp(),
        "rollout_corr/rollout_log_ppl": rollout_log_ppl,
        "rollout_corr/log_ppl_diff": difference,
        "rollout_corr/log_ppl_abs_diff": difference.abs(),
        "rollout_corr/ppl_ratio": difference.exp(),
        "rollout_corr/chi2_seq": torch.expm1(2.0 * bounded(row_sums(old - rollout, offsets))),
    }
    sums = {name: _masked_sum(values, loss_mask) for name, values in of_tokens.items()}
    return sums | {name: _masked_sum(values, counts > 0) for name, values in of_rows.items()}


def _masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of values where the mask is True, and their number, as scalars."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(), mask.sum().to(values.dtype)


@converts_arguments
def weight_metrics(
    weights: Tensor,
    log_ratio: Tensor,
    loss_mask: Tensor,
    offsets: Tensor,
    *,
    level: CorrectionLevel,
    cap: WeightCap = 2.0,
    floor: WeightFloor | None = None,
) -> dict[str, Tensor]:
    """Return statistics of the weights of a global batch.

    Args:
        weights: [T] weights from `importance_weights`.
        log_ratio: [T] old_logprobs - rollout_logprobs; masked values are ignored.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 row offsets.
        level: Scope of a ratio, "token" or "sequence".
        cap: Upper bound of the weights.
        floor: Lower bound of banded weights. None for truncated ones; ratios below 1 / cap then count as low.

    Returns:
        `rollout_corr/rollout_is_*` by name: mean, std, min, max and effective sample share of the weights, and the
        shares of unbounded ratios above and below the bounds; `rollout_is_seq_*` for trajectories. With a floor also
        `oob_ratio`, the share of tokens with weight 0. Empty if no token trains.

    Raises:
        SettingsError: The level is unknown, or a bound is not above 0.
    """
    if not bool(loss_mask.any()):
        return {}
    ratios = importance_ratios(log_ratio, loss_mask, offsets, level=level)
    has_tokens = row_counts(loss_mask, offsets) > 0
    of_rows = row_means(weights, loss_mask, offsets)[has_tokens].double()
    ratio_of_rows = row_means(ratios, loss_mask, offsets)[has_tokens].double()
    ratio_of_tokens = ratios[loss_mask].double()
    low = 1.0 / cap if floor is None else floor
    of_tokens = weights[loss_mask].double()
    metrics = {
        **_spread(of_tokens),
        "eff_sample_size": _effective_share(of_tokens),
        **{f"seq_{name}": value for name, value in _spread(of_rows, correction=1).items()},
        "seq_max_deviation": (of_rows - 1.0).abs().max(),
    }
    judged = ratio_of_rows if level == "sequence" else ratio_of_tokens
    for stem, values in (("ratio_", judged), ("seq_", ratio_of_rows)):
        metrics[f"{stem}fraction_high"] = (values > cap).double().mean()
        metrics[f"{stem}fraction_low"] = (values < low).double().mean()
    if floor is not None:
        metrics["oob_ratio"] = ((ratio_of_tokens < floor) | (ratio_of_tokens > cap)).double().mean()
    return {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}


def _effective_share(weights: Tensor) -> Tensor:
    """Return the effective sample size as a share of the samples, in [0, 1]; 0 if all weights are 0."""
    return weights.mean().square() / weights.square().mean() if bool(weights.any()) else weights.new_zeros(())


def _spread(values: Tensor, *, correction: int = 0) -> dict[str, Tensor]:
    """Return mean, standard deviation (0 for too few values), minimum and maximum of values [K]."""
    has_spread = len(values) > correction
    return {
        "mean": values.mean(),
        "std": values.std(correction=correction) if has_spread else values.new_zeros(()),
        "max": values.max(),
        "min": values.min(),
    }
