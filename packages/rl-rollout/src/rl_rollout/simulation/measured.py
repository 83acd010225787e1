"""Workload from the metrics of a run's steps: their medians, and the lengths that they imply."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, median

from rl_core.errors import SettingsError
from rl_rollout.simulation.synchronous import simulate_sync
from rl_rollout.simulation.workload import BatchShape, EngineCosts, LearnerCosts, Lengths, WeightCosts, Workload

SLOTS = 1024
MEASURED_METRICS = (
    "timing_s/gen",
    "timing_s/update_actor",
    "rollout/num_groups",
    "rollout/num_trajectories",
    "response_length/mean",
    "response_length/max",
    "prompt_length/mean",
    "agent_loop/slowest/generate_sequences",
    "agent_loop/slowest/response_length",
)
"""Metrics that at least one step must have."""


def measure_workload(
    steps: Sequence[Mapping[str, float]],
    *,
    name: str,
    rollout_gpus: int,
    train_gpus: int,
    mini_batches: int = 1,
    max_response_tokens: int | None = None,
) -> Workload:
    """Return the workload of a synchronous run, whose `timing_s/gen` covers a whole step's generation.

    All engines are treated as one engine on all GPUs. The seconds of a decoding step are those of the slowest response
    when it ran alone, and grow with the batch so that simulated generation takes as long as measured.

    Args:
        steps: Metrics of each step by name. At least one step must have each of `MEASURED_METRICS`.
        name: Name of the workload.
        rollout_gpus: Number of GPUs that generated.
        train_gpus: Number of GPUs that trained; they may be the same.
        mini_batches: Number of optimizer updates per step.
        max_response_tokens: Length limit of responses; None uses the longest response.

    Raises:
        SettingsError: No step has one of the metrics.
    """
    missing = [metric for metric in MEASURED_METRICS if not any(metric in step for step in steps)]
    if missing:
        raise SettingsError(
            f"{name} has no step with {', '.join(missing)}. A workload is measured from a run of rl-sync-trainer with "
            "at least one step."
        )
    middle = {metric: _median(steps, metric) for metric in MEASURED_METRICS}
    groups = round(middle["rollout/num_groups"])
    responses = round(middle["rollout/num_trajectories"])
    tokens = responses * (middle["response_length/mean"] + middle["prompt_length/mean"])
    floor = middle["agent_loop/slowest/generate_sequences"] / middle["agent_loop/slowest/response_length"]
    workload = Workload(
        name=name,
        batch=BatchShape(
            groups=groups,
            group_size=max(1, responses // groups),
            mini_batch_groups=groups // mini_batches if groups % mini_batches == 0 else groups,
        ),
        lengths=_lengths(middle, responses, max_response_tokens),
        engine=EngineCosts(gpus=rollout_gpus, slots=max(SLOTS, responses), decode=((1, floor), (2, floor))),
        learner=LearnerCosts(
            update_gpu_s_per_token=middle["timing_s/update_actor"] * train_gpus / tokens,
            logprobs_gpu_s_per_token=_median(steps, "timing_s/old_log_prob") * train_gpus / tokens,
            sync_step_s=_median(steps, "timing_s/reward") + _median(steps, "timing_s/adv"),
            reference_gpus=train_gpus,
        ),
        weights=WeightCosts(publish_s=_median(steps, "timing_s/update_weights")),
    )
    return _with_slope(workload, floor, gen_s=middle["timing_s/gen"])


def _with_slope(workload: Workload, floor: float, *, gen_s: float) -> Workload:
    """Return the workload whose decoding time grows with the batch so that a step generates for gen_s seconds.

    All responses of a step are decoded at once, so its seconds are linear in those of a decoding step and their growth.
    If decoding takes too long even without growth, the slowest response did not run alone. Then the time of a single
    response is reduced instead.
    """

    def with_decode(first: float, slope: float) -> Workload:
        return replace(workload, engine=replace(workload.engine, decode=((1, first), (2, first + slope))))

    flat_s, growing_s = (
        simulate_sync(with_decode(1.0, slope), gpus=workload.engine.gpus, num_steps=3, seed=0).gen_s
        for slope in (0.0, 1.0)
    )
    first = min(floor, gen_s / flat_s)
    return with_decode(first, max(0.0, gen_s - first * flat_s) / max(1.0, growing_s - flat_s))


def _lengths(middle: Mapping[str, float], responses: int, maximum: int | None) -> Lengths:
    """Return a log-normal with the measured mean, whose expected longest of these responses is the measured longest."""
    mean, longest = middle["response_length/mean"], middle["response_length/max"]
    score = NormalDist().inv_cdf(1 - 0.5 / max(2, responses))
    spread = score * score - 2 * math.log(max(1.0, longest / mean))
    sigma = score - math.sqrt(max(0.0, spread))
    return Lengths(
        maximum=max(1, round(longest) if maximum is None else maximum),
        median=mean / math.exp(sigma * sigma / 2),
        sigma=sigma,
        prompt_tokens=round(middle["prompt_length/mean"]),
    )


def _median(steps: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the median over the steps that have the metric; 0 if none has it."""
    return median([step[name] for step in steps if name in step] or [0.0])
