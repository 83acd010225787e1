"""Token statistics that distinguish causes of a mismatch, as pure functions."""

import math
from dataclasses import dataclass

import numpy as np

from rl_metrics.doctor.token_pairs import Bools, Floats, TokenPairs

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a difference.

    Attributes:
        tokens: Number of compared tokens.
        mean_abs: Mean absolute difference of logprobs, in nats.
        largest: Maximum absolute difference, in nats.
        k1_kl: Mean of the engine's minus the learner's logprob.
        k3_kl: Mean of ratio - 1 - log ratio; equals k1 in expectation if the engine samples from the distribution it
            reports.
        ppl_ratio: Mean over responses of the learner's perplexity over the engine's.
    """

    tokens: int
    mean_abs: float
    largest: float
    k1_kl: float
    k3_kl: float
    ppl_ratio: float


def measure(pairs: TokenPairs) -> Size:
    """Return the size of the difference; 0 without tokens."""
    if not len(pairs):
        return Size(tokens=0, mean_abs=0.0, largest=0.0, k1_kl=0.0, k3_kl=0.0, ppl_ratio=1.0)
    diff = np.clip(pairs.diff, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    _, trajectory_of, counts = np.unique(pairs.trajectory, return_inverse=True, return_counts=True)
    by_trajectory = np.bincount(trajectory_of, weights=diff) / counts
    return Size(
        tokens=len(pairs),
        mean_abs=float(np.abs(diff).mean()),
        largest=float(np.abs(pairs.diff).max()),
        k1_kl=float(-diff.mean()),
        k3_kl=float((np.expm1(diff) - diff).mean()),
        ppl_ratio=float(np.exp(-by_trajectory).mean()),
    )


def rank_sum_z(first: Floats, second: Floats) -> float:
    """Return by how many standard deviations the second sample ranks above the first (Mann-Whitney).

    Equal values share their mean rank. The result is 0 if either sample is empty.
    """
    m, n = len(first), len(second)
    if not m or not n:
        return 0.0
    values, inverse, counts = np.unique(np.concatenate([first, second]), return_inverse=True, return_counts=True)
    if len(values) == 1:
        return 0.0
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    total = m + n
    expected = n * (total + 1) / 2.0
    ties = float((counts.astype(np.float64) ** 3 - counts).sum()) / (total * (total - 1.0))
    variance = m * n / 12.0 * (total + 1 - ties)
    return float((ranks[m:].sum() - expected) / math.sqrt(variance))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Comparison of two groups of tokens at equal doubt.

    Attributes:
        before: Mean absolute difference of the first group, in nats, at the mean doubt of all tokens.
        after: The same of the second group.
        z: Significance of the second being larger, in standard deviations.
    """

    before: float
    after: float
    z: float

    @property
    def times(self) -> float:
        """The second over the first, which counts as at least 1e-5."""
        return self.after / max(self.before, 1e-5)


def contrast(diff: Floats, doubt: Floats, first: Bools, second: Bools) -> Contrast:
    """Compare the differences of two groups of tokens, corrected for doubt."""
    scaled = np.abs(diff) / doubt
    usual = float(doubt.mean()) if len(doubt) else 0.0
    before, after = (float(scaled[group].mean()) if group.any() else 0.0 for group in (first, second))
    return Contrast(before=before * usual, after=after * usual, z=rank_sum_z(scaled[first], scaled[second]))


def fit_temperature(pairs: TokenPairs, anchor: Bools) -> tuple[float, float, Floats]:
    """Fit one ratio of temperatures to the differences of the anchor tokens.

    Let r be the engine's logprobs at a position and g the ratio. The learner's logprobs are g r - log sum exp(g r),
    with derivative r + H at g = 1, where H is the entropy. The fit uses the engine's logprobs because the tokens were
    sampled from them: errors of the learner's logprobs then affect only the difference, and produce no line. Without
    entropies, H is left out.

    Args:
        pairs: All tokens.
        anchor: [N] bool, tokens to fit.

    Returns:
        The engine's temperature over the learner's, the share of the squared difference explained by the fit, and the
        [N] fitted differences of all tokens.
    """
    has_entropy = bool(len(pairs)) and bool(np.isfinite(pairs.entropy).mean() > 0.99)
    lever = pairs.rollout + np.nan_to_num(pairs.entropy) if has_entropy else pairs.rollout
    x, y = lever[anchor], pairs.diff[anchor]
    if has_entropy and len(x):
        x, y = x - x.mean(), y - y.mean()
    spread, total = float(x @ x), float(y @ y)
    if spread <= 0.0 or total <= 0.0:
        return 1.0, 0.0, np.zeros(len(pairs))
    slope = float(x @ y) / spread
    rest = y - slope * x
    return 1.0 + slope, 1.0 - float(rest @ rest) / total, slope * lever


def upward_share(diff: Floats) -> float:
    """Return the share of the absolute difference in tokens that are more likely to the learner than to the engine."""
    total = float(np.abs(diff).sum())
    return float(np.maximum(diff, 0.0).sum()) / total if total else 0.5


def cut_mass(diff: Floats, *, certain: float) -> tuple[float, float]:
    """Measure how much of the learner's distribution the engine can sample.

    Args:
        diff: [N] differences.
        certain: Standard errors below 1 at which chance cannot explain a mean ratio.

    Returns:
        The mean ratio of the learner's to the engine's probability, which is the mass that the engine keeps (1 for full
        distributions); and the share of the ratios' distance from 1 that comes from a mean below 1, 0 if chance
        explains it.
    """
    if not diff.any():
        return 1.0, 0.0
    ratio = np.exp(np.clip(diff, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    kept = float(ratio.mean())
    error = float(ratio.std()) / math.sqrt(len(ratio))
    is_certain = 1.0 - kept > certain * error
    lost = (1.0 - kept) / float(np.abs(1.0 - ratio).mean()) if is_certain else 0.0
    return kept, max(lost, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outliers:
    """Tokens that differ by many times the usual difference at their doubt.

    Attributes:
        count: Number of outliers.
        tokens: Share of all tokens.
        carried: Share of the absolute difference in outliers.
        times: Mean difference of outliers over the median, at equal doubt.
    """

    count: int
    tokens: float
    carried: float
    times: float


def find_outliers(diff: Floats, doubt: Floats, *, beyond: float, floor: float) -> Outliers:
    """Find outliers among tokens.

    Args:
        diff: [N] differences, in nats.
        doubt: [N] doubt of the tokens.
        beyond: Minimum ratio of an outlier to the median.
        floor: Minimum value of the median, in nats at full doubt, so that float32 rounding makes no outliers.
    """
    total = float(np.abs(diff).sum())
    if not total:
        return Outliers(count=0, tokens=0.0, carried=0.0, times=0.0)
    scaled = np.abs(diff) / doubt
    usual = max(float(np.median(scaled)), floor)
    chosen = scaled > beyond * usual
    return Outliers(
        count=int(chosen.sum()),
        tokens=float(chosen.mean()),
        carried=float(np.abs(diff[chosen]).sum()) / total,
        times=float(scaled[chosen].mean()) / usual if chosen.any() else 0.0,
    )


def correlation(x: Floats, y: Floats) -> float:
    """Return Pearson's correlation; 0 if either is constant."""
    if len(x) < 3 or not x.std() or not y.std():
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
