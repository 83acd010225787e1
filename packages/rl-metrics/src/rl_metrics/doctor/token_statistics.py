"""Statistics by which causes of a mismatch differ: pure functions of tokens."""

import math
from dataclasses import dataclass

import numpy as np

from rl_metrics.doctor.token_pairs import Bools, Floats, TokenPairs

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a difference is.

    Attributes:
        tokens: Compared.
        mean_abs: Of the logprobs' differences, nats.
        largest: Of them.
        k1_kl: Mean of the engine's minus the learner's logprob.
        k3_kl: Mean of ratio - 1 - log ratio; both estimate the same KL where the engine draws from what it says.
        ppl_ratio: Learner's over engine's perplexity of a response, mean.
    """

    tokens: int
    mean_abs: float
    largest: float
    k1_kl: float
    k3_kl: float
    ppl_ratio: float


def measure(pairs: TokenPairs) -> Size:
    """The size of the difference; of no tokens it is 0."""
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
    """How surely the second are larger than the first, in standard deviations (Mann-Whitney); 0 where either is empty.

    Equal values share their mean rank.
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
    """Two groups of tokens, at equal doubt.

    Attributes:
        before: Mean absolute difference of the first group, nats, at the doubt of all.
        after: Of the second.
        z: How surely the second is larger, in standard deviations.
    """

    before: float
    after: float
    z: float

    @property
    def times(self) -> float:
        """The second over the first; where the first is 0 or rounding, as if it were 1e-5."""
        return self.after / max(self.before, 1e-5)


def contrast(diff: Floats, doubt: Floats, first: Bools, second: Bools) -> Contrast:
    """Whether one group of tokens differs more than another, beside being less certain."""
    scaled = np.abs(diff) / doubt
    usual = float(doubt.mean()) if len(doubt) else 0.0
    before, after = (float(scaled[group].mean()) if group.any() else 0.0 for group in (first, second))
    return Contrast(before=before * usual, after=after * usual, z=rank_sum_z(scaled[first], scaled[second]))


def fit_temperature(pairs: TokenPairs, anchor: Bools) -> tuple[float, float, Floats]:
    """Fit the line that one ratio of temperatures draws through the differences of the anchor's tokens.

    With r the engine's logprobs of a position, the learner's are g r - log sum exp(g r), g the ratio; the derivative at
    g = 1 is r + H, H the entropy there. The engine's side is the lever because the tokens were drawn from it: errors of
    the learner's side then are errors of the difference alone, and draw no line. Without entropies H is left out.

    Args:
        pairs: All tokens.
        anchor: [N] those to fit.

    Returns:
        The engine's temperature over the learner's, the share of the squared difference that the line explains, and
        [N] the differences of all tokens as the line has them.
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
    """Share of the absolute difference that is upwards: the learner thinks the token likelier than the engine."""
    total = float(np.abs(diff).sum())
    return float(np.maximum(diff, 0.0).sum()) / total if total else 0.5


def cut_mass(diff: Floats, *, certain: float) -> tuple[float, float]:
    """How much of the learner's distribution the engine may draw.

    Args:
        diff: [N] differences.
        certain: Standard errors by which a mean ratio is below 1 where chance does not explain it.

    Returns:
        Mean ratio of learner's to engine's probability, the mass that the engine keeps: 1 for full distributions; and
        the share of the ratios' distance from 1 that is a mean below 1, 0 where chance explains it.
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
    """Tokens that differ by many times what is usual at their doubt.

    Attributes:
        count: How many.
        tokens: Share of the tokens.
        carried: Share of the absolute difference that they carry.
        times: Their mean difference over the median, at equal doubt.
    """

    count: int
    tokens: float
    carried: float
    times: float


def find_outliers(diff: Floats, doubt: Floats, *, beyond: float, floor: float) -> Outliers:
    """The outliers among tokens.

    Args:
        diff: [N] differences.
        doubt: [N] of the tokens.
        beyond: Times the median that make an outlier.
        floor: Nats, at full doubt, that the median counts as at least, so that float32's rounding makes none.
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
    """Pearson's; 0 where either does not vary."""
    if len(x) < 3 or not x.std() or not y.std():
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
