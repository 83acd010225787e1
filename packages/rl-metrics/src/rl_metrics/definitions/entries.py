"""Constructors of the table's entries."""

from functools import partial

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


def at_most(high: float) -> Band:
    """Return a rule of thumb: values up to this are healthy."""
    return Band(high=high, source=THUMB)


def at_least(low: float) -> Band:
    """Return a rule of thumb: values from this on are healthy."""
    return Band(low=low, source=THUMB)


def between(low: float, high: float) -> Band:
    """Return a rule of thumb: values in this range are healthy."""
    return Band(low=low, high=high, source=THUMB)


def spread(
    stem: str, meaning: str, unit: str = "1", *, over: WeightedBy, healthy_mean: Band | None = None
) -> tuple[Metric, ...]:
    """Return metrics for mean, maximum and minimum of one quantity."""
    return (
        mean(f"{stem}/mean", f"{meaning}, mean.", unit, over=over, healthy=healthy_mean),
        highest(f"{stem}/max", f"{meaning}, maximum.", unit),
        lowest(f"{stem}/min", f"{meaning}, minimum.", unit),
    )


def mean(name: str, meaning: str, unit: str = "1", *, over: WeightedBy, healthy: Band | None = None) -> Metric:
    """Return a weighted mean."""
    return Metric(name=name, unit=unit, reduction="mean", weighted_by=over, meaning=meaning, healthy=healthy)


token_mean = partial(mean, over="token")
trajectory_mean = partial(mean, over="trajectory")
session_mean = partial(mean, over="session")
group_mean = partial(mean, over="group")
prompt_mean = partial(mean, over="prompt")
step_mean = partial(mean, over="step")


def unweighted(
    name: str, meaning: str, unit: str = "1", *, reduction: Reduction, healthy: Band | None = None
) -> Metric:
    """Return a metric that is not weighted."""
    return Metric(name=name, unit=unit, reduction=reduction, meaning=meaning, healthy=healthy)


newest = partial(unweighted, reduction="last")
total = partial(unweighted, reduction="sum")
highest = partial(unweighted, reduction="max")
lowest = partial(unweighted, reduction="min")


def seconds(phase: str, meaning: str) -> Metric:
    """Return the time metric of a phase of the step."""
    return total(f"timing_s/{phase}", f"{meaning}, total in the step.", "s")


def histogram(name: str, unit: str, meaning: str, *, of: WeightedBy) -> Metric:
    """Return a distribution over tokens, trajectories or groups."""
    return Metric(
        name=f"distribution/{name}",
        unit=unit,
        reduction="histogram",
        weighted_by=of,
        meaning=f"{meaning}, distribution.",
    )
