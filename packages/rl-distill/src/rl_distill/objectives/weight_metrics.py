"""Statistics of a batch's importance weights.

Source: metric names follow verl; effective sample size, Kong 1992.
"""

from torch import Tensor

from rl_core.record_fields import converts_arguments
from rl_distill.objectives.correction import CorrectionLevel, WeightCap, WeightFloor, importance_ratios
from rl_distill.objectives.ragged import row_counts, row_means


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
        weights: [T] weights from `truncated_weights` or `banded_weights`.
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
    metrics = {
        **_of_tokens(weights[loss_mask].double()),
        **_of_rows(of_rows),
        **_outside(ratio_of_rows if level == "sequence" else ratio_of_tokens, low, cap, stem="ratio_"),
        **_outside(ratio_of_rows, low, cap, stem="seq_"),
    }
    if floor is not None:
        is_out = (ratio_of_tokens < floor) | (ratio_of_tokens > cap)
        metrics["oob_ratio"] = is_out.double().mean()
    return {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}


def _of_tokens(weights: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the weights [M] of trained tokens."""
    return {**_spread(weights), "eff_sample_size": _effective_share(weights)}


def _of_rows(weights: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the mean weights [N] of trajectories with a trained token."""
    spread = {f"seq_{name}": value for name, value in _spread(weights, correction=1).items()}
    return {**spread, "seq_max_deviation": (weights - 1.0).abs().max()}


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


def _outside(ratios: Tensor, low: float, high: float, *, stem: str) -> dict[str, Tensor]:
    """Return the shares of ratios [K] outside the bounds."""
    return {
        f"{stem}fraction_high": (ratios > high).double().mean(),
        f"{stem}fraction_low": (ratios < low).double().mean(),
    }
