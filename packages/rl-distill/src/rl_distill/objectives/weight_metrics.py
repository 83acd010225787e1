"""What the importance weights of a batch look like.

Source: names of metrics as verl's; effective sample size, Kong 1992.
"""

from torch import Tensor

from rl_distill.objectives.correction import CorrectionLevel, WeightCap, WeightFloor, importance_ratios
from rl_distill.objectives.option_rules import checked
from rl_distill.objectives.ragged import row_counts, row_means


@checked
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
    """Statistics of the weights of a global batch.

    Args:
        weights: [T] from `truncated_weights` or `banded_weights`.
        log_ratio: [T] old_logprobs - rollout_logprobs; anything where masked.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 rows.
        level: What one ratio covers.
        cap: Upper bound.
        floor: Lower bound of banded weights; None truncates from above alone, and calls ratios below 1 / cap low.

    Returns:
        `rollout_corr/rollout_is_*` by name: of the weights mean, std, min, max and the effective share of samples; of
        the ratios before any bound the shares above and below; the same of trajectories as `rollout_is_seq_*`. With a
        floor also `oob_ratio`, the share of tokens whose weight is 0. Empty when nothing trains.

    Raises:
        SettingsError: The level is not known, or a bound is not above 0.
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
    """Of the weights of trained tokens [M]."""
    return {**_spread(weights), "eff_sample_size": _effective_share(weights)}


def _of_rows(weights: Tensor) -> dict[str, Tensor]:
    """Of the mean weights of trajectories with a trained token [N]."""
    spread = {f"seq_{name}": value for name, value in _spread(weights, correction=1).items()}
    return {**spread, "seq_max_deviation": (weights - 1.0).abs().max()}


def _effective_share(weights: Tensor) -> Tensor:
    """Share of equally weighted samples that would have the same variance, in [0, 1]; 0 where all weights are 0."""
    return weights.mean().square() / weights.square().mean() if bool(weights.any()) else weights.new_zeros(())


def _spread(values: Tensor, *, correction: int = 0) -> dict[str, Tensor]:
    """Mean, standard deviation (0 where there are too few) and extremes of values [K]."""
    has_spread = len(values) > correction
    return {
        "mean": values.mean(),
        "std": values.std(correction=correction) if has_spread else values.new_zeros(()),
        "max": values.max(),
        "min": values.min(),
    }


def _outside(ratios: Tensor, low: float, high: float, *, stem: str) -> dict[str, Tensor]:
    """Shares of ratios [K] beyond the bounds."""
    return {
        f"{stem}fraction_high": (ratios > high).double().mean(),
        f"{stem}fraction_low": (ratios < low).double().mean(),
    }
