"""Arithmetic of side-by-side runs: speeds, ratios of pairs, learning curves, lengths. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

WARM_UP_STEPS = 3
"""Number of first steps of every run that are not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measurements of one run, with one entry per step.

    Attributes:
        system: "ours" or "trl".
        step_s: Seconds from the start of generation to the end of the optimizer step; for ours, to the end of the proof
            that the new weights are served.
        rewards: Mean reward of each step.
        mean_lengths: Mean response tokens of each step.
        max_lengths: Longest response of each step, in tokens.
        part_s: Seconds of each named part of a step.
        wall_s: Seconds of the whole process, including start-up.
        load_before: Load average of the minute before the run.
        lengths: Response tokens of each sample, if the system reports them.
        versions: Versions of its packages.
    """

    system: str
    step_s: list[float]
    rewards: list[float]
    mean_lengths: list[float]
    max_lengths: list[float]
    part_s: dict[str, list[float]]
    wall_s: float
    load_before: float
    lengths: list[int] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def measured(values: Sequence[float]) -> list[float]:
    """Return the values without the warm-up steps.

    Raises:
        ValueError: Nothing is left.
    """
    if len(values) <= WARM_UP_STEPS:
        raise ValueError(f"a run needs more than {WARM_UP_STEPS} steps to be measured; found {len(values)}.")
    return list(values[WARM_UP_STEPS:])


def samples_per_s(step_s: Sequence[float], *, samples_per_step: int) -> float:
    """Return samples per second over the measured steps."""
    steps = measured(step_s)
    return samples_per_step * len(steps) / sum(steps)


def spread(values: Sequence[float]) -> float:
    """Return the range as a share of the median: the noise between equal runs."""
    return (max(values) - min(values)) / median(values)


def final_third(values: Sequence[float]) -> float:
    """Return the mean of the last third, of at least one value."""
    return fmean(values[-max(1, len(values) // 3) :])


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of equally long curves at each step."""
    return [fmean(step) for step in zip(*curves, strict=True)]


def share_below(lengths: Sequence[int], limit: int) -> float:
    """Return the share of lengths below the limit."""
    return sum(length < limit for length in lengths) / len(lengths)


def histogram(lengths: Sequence[int], *, width: int, longest: int) -> dict[str, int]:
    """Return counts by "first-last", in bins of equal width from 1 to `longest`."""
    bins = [(first, first + width - 1) for first in range(1, longest + 1, width)]
    return {f"{first}-{last}": sum(first <= length <= last for length in lengths) for first, last in bins}


def system_result(runs: Sequence[Run], *, workload: str, samples_per_step: int) -> dict[str, object]:
    """Return a row of the results: the median run's speed, and other numbers of the runs."""
    speeds = [samples_per_s(run.step_s, samples_per_step=samples_per_step) for run in runs]
    every_step = [seconds for run in runs for seconds in measured(run.step_s)]
    parts = {name: [seconds for run in runs for seconds in measured(run.part_s[name])] for name in runs[0].part_s}
    return {
        "system": runs[0].system,
        "workload": workload,
        "samples_per_s": round(median(speeds), 1),
        "step_s_median": round(median(every_step), 4),
        "samples_per_s_runs": [round(speed, 1) for speed in speeds],
        "samples_per_s_spread": round(spread(speeds), 3),
        "part_s_median": {name: round(median(values), 4) for name, values in parts.items()},
        "response_tokens_mean": round(fmean(length for run in runs for length in run.mean_lengths), 2),
        "response_tokens_max": max(length for run in runs for length in run.max_lengths),
        "reward_curve": [round(value, 4) for value in mean_curve([run.rewards for run in runs])],
        "wall_s_runs": [round(run.wall_s, 1) for run in runs],
        "load_before_runs": [round(run.load_before, 2) for run in runs],
        "versions": runs[0].versions,
    }


def comparison(
    ours: Sequence[Run], peer: Sequence[Run], *, workload: str, samples_per_step: int, target: float
) -> dict[str, object]:
    """Compare ours with the peer, pair by pair.

    Args:
        ours: One run per pair.
        peer: The run that followed each.
        workload: Its name.
        samples_per_step: Samples per step.
        target: Minimum ratio of samples per second.

    Returns:
        The median of the pairs' ratios, whether it meets the target, and the difference of the learning curves.
    """
    ratios = [
        samples_per_s(mine.step_s, samples_per_step=samples_per_step)
        / samples_per_s(theirs.step_s, samples_per_step=samples_per_step)
        for mine, theirs in zip(ours, peer, strict=True)
    ]
    thirds = [final_third(m.rewards) - final_third(t.rewards) for m, t in zip(ours, peer, strict=True)]
    return {
        "workload": workload,
        "ratio": round(median(ratios), 3),
        "ratio_pairs": [round(ratio, 3) for ratio in ratios],
        "target": target,
        "is_met": median(ratios) >= target,
        "final_third_reward_ours": round(fmean(final_third(run.rewards) for run in ours), 4),
        "final_third_reward_trl": round(fmean(final_third(run.rewards) for run in peer), 4),
        "final_third_difference": round(fmean(thirds), 4),
        "final_third_difference_pairs": [round(value, 4) for value in thirds],
    }
