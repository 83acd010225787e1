"""Constructors of the table's entries."""

from rl_metrics.definitions.definition import Band, Metric, Reduction, WeightedBy

GUIDE = "evaluation guide"
GUIDE_KL = f"{GUIDE}, which recommends 0.005 to 0.02"
THUMB = "rule of thumb"
BY_DESIGN = "by definition"
PROOF = "weight proof in float32"

ZERO = Band(high=0.0, source=BY_DESIGN)
"""Healthy range of counts that must be 0."""


def spread(
    stem: str, *, unit: str, meaning: str, over: WeightedBy, healthy_mean: Band | None = None
) -> tuple[Metric, ...]:
    """Return metrics for mean, maximum and minimum of one quantity."""
    mean = Metric(
        name=f"{stem}/mean",
        unit=unit,
        reduction="mean",
        weighted_by=over,
        meaning=f"{meaning}, mean.",
        healthy=healthy_mean,
    )
    high = Metric(name=f"{stem}/max", unit=unit, reduction="max", meaning=f"{meaning}, maximum.")
    low = Metric(name=f"{stem}/min", unit=unit, reduction="min", meaning=f"{meaning}, minimum.")
    return mean, high, low


def mean(name: str, unit: str, meaning: str, *, over: WeightedBy, healthy: Band | None = None) -> Metric:
    """Return a weighted mean."""
    return Metric(name=name, unit=unit, reduction="mean", weighted_by=over, meaning=meaning, healthy=healthy)


def one(name: str, unit: str, meaning: str, *, reduction: Reduction = "last", healthy: Band | None = None) -> Metric:
    """Return a metric that is not weighted; by default, the newest value."""
    return Metric(name=name, unit=unit, reduction=reduction, meaning=meaning, healthy=healthy)


def seconds(phase: str, meaning: str) -> Metric:
    """Return the time metric of a phase of the step."""
    return one(f"timing_s/{phase}", "s", f"{meaning}, total in the step.", reduction="sum")
