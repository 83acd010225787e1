"""What the importance weights of a batch look like.

Source: names of metrics as verl's; effective sample size, Kong 1992.
"""

from torch import Tensor

from rl_distill.objectives.correction import CorrectionLevel, importance_ratios
from rl_distill.objectives.ragged import row_counts, row_means


def weight_metrics(
    weights: Tensor,
    log_ratio: Tensor,
    loss_mask: Tensor,
    offsets: Tensor,
    *,
    level: CorrectionLevel,
    cap: float,
    floor: float | None = None,
) -> dict[str, Tensor]:
    """Statistics of the weights of a global batch.

    Args:
        weights: [T] from `truncated_weights` or `banded_weights`.
        log_ratio: [T] old_logprobs - rollout_logprobs; anything where masked.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 rows.
        level: What one ratio covers.
        cap: Upper bound of the weights.
        floor: Lower bound of banded weights; None counts low ratios below 1 / cap.

    Returns:
        `rollout_corr/rollout_is_*` by name: of the weights mean, std, min, max and the effective share of samples; of
        the ratios before any bound the shares above and below; the same of trajectories as `rollout_is_seq_*`. With a
        floor also `oob_ratio`, the share of tokens whose weight is 0. None when nothing trains.
    """
    if not bool(loss_mask.any()):
        return {}
    low = 1.0 / cap if floor is None else floor
    ratios = importance_ratios(log_ratio, loss_mask, offsets, level=level)
    has_tokens = row_counts(loss_mask, offsets) > 0
    kept, of_tokens = weights[loss_mask].double(), ratios[loss_mask].double()
    of_rows = row_means(weights, loss_mask, offsets)[has_tokens].double()
    ratio_of_rows = row_means(ratios, loss_mask, offsets)[has_tokens].double()
    judged = ratio_of_rows if level == "sequence" else of_tokens
    metrics = {
        "mean": kept.mean(),
        "std": kept.std(correction=0),
        "max": kept.max(),
        "min": kept.min(),
        "eff_sample_size": kept.mean().square() / kept.square().mean() if bool(kept.any()) else kept.new_zeros(()),
        "ratio_fraction_high": (judged > cap).double().mean(),
        "ratio_fraction_low": (judged < low).double().mean(),
        "seq_mean": of_rows.mean(),
        "seq_std": of_rows.std() if len(of_rows) > 1 else of_rows.new_zeros(()),
        "seq_max": of_rows.max(),
        "seq_min": of_rows.min(),
        "seq_max_deviation": (of_rows - 1.0).abs().max(),
        "seq_fraction_high": (ratio_of_rows > cap).double().mean(),
        "seq_fraction_low": (ratio_of_rows < low).double().mean(),
    }
    if floor is not None:
        metrics["oob_ratio"] = ((of_tokens < floor) | (of_tokens > cap)).double().mean()
    return {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}
