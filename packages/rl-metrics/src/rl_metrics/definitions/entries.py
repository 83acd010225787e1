"""Constructors of the table's entries."""

from rl_metrics.definitions.definition import Band, Metric, Reduction, WeightedBy

GUIDE = "evaluation guide"
GUIDE_KL = f"{GUIDE}, which recommends 0.005 to 0.02"
THUMB = "rule of thumb"
BY_DESIGN = "by definition"
PROOF = "weight proof in float32"

POLICY_LOSS = Band(low=-0.2, high=0.1, source=GUIDE)
POLICY_LOSS_MEAN = Band(low=-0.05, high=0.05, source=GUIDE)
"""Mean of the policy loss over all steps of a run."""

ADVANTAGES_MEAN = Band(low=-0.5, high=0.5, source=THUMB)
STEP_KL = Band(low=-0.03, high=0.03, source=GUIDE_KL)
"""KL of a step's updates; its k1 estimate may be negative."""

KL_TO_REFERENCE = Band(high=0.03, source=GUIDE_KL)
ENTROPY = Band(low=0.2, high=0.5, source=f"{GUIDE}, late in a run")
LAST_ENTROPY = Band(high=1.0, source=GUIDE)
"""Entropy at the end of a run; above, the policy has not converged."""

GRAD_NORM = Band(high=1.0, source=GUIDE)
GRAD_NORM_MEAN = Band(high=0.8, source=GUIDE)
"""Mean of the gradient norm over all steps of a run."""

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
