"""Short ways to write the entries of the table."""

from rl_metrics.definitions.definition import Band, Metric, Reduction, WeightedBy

GUIDE = "evaluation guide"
GUIDE_KL = f"{GUIDE}, which likes 0.005 to 0.02"
THUMB = "rule of thumb"
BY_DESIGN = "by definition"
PROOF = "weight proof in float32"

ZERO = Band(high=0.0, source=BY_DESIGN)
"""Healthy where there is none."""


def spread(
    stem: str, *, unit: str, meaning: str, over: WeightedBy, healthy_mean: Band | None = None
) -> tuple[Metric, ...]:
    """Mean, largest and smallest of one quantity."""
    mean = Metric(
        name=f"{stem}/mean",
        unit=unit,
        reduction="mean",
        weighted_by=over,
        meaning=f"{meaning}, mean.",
        healthy=healthy_mean,
    )
    high = Metric(name=f"{stem}/max", unit=unit, reduction="max", meaning=f"{meaning}, largest.")
    low = Metric(name=f"{stem}/min", unit=unit, reduction="min", meaning=f"{meaning}, smallest.")
    return mean, high, low


def mean(name: str, unit: str, meaning: str, *, over: WeightedBy, healthy: Band | None = None) -> Metric:
    """A metric that is a mean."""
    return Metric(name=name, unit=unit, reduction="mean", weighted_by=over, meaning=meaning, healthy=healthy)


def one(name: str, unit: str, meaning: str, *, reduction: Reduction = "last", healthy: Band | None = None) -> Metric:
    """A metric that is one number."""
    return Metric(name=name, unit=unit, reduction=reduction, meaning=meaning, healthy=healthy)


def seconds(phase: str, meaning: str) -> Metric:
    """The time of a phase of the step."""
    return one(f"timing_s/{phase}", "s", f"{meaning}; the time of all its parts in the step.", reduction="sum")
