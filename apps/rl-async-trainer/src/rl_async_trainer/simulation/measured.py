"""A workload measured from a run's metrics: the medians of its steps, and the lengths that they say."""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

from rl_async_trainer.simulation.synchronous import simulate_sync
from rl_async_trainer.simulation.workload import (
    BatchShape,
    EngineCosts,
    LearnerCosts,
    Lengths,
    WeightCosts,
    Workload,
)
from rl_core.errors import SettingsError

SLOTS = 1024
NEEDED = (
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


def measure_workload(run: Path, *, rollout_gpus: int, train_gpus: int) -> Workload:
    """The workload of a run of `rl-sync-trainer`, whose `timing_s/gen` is a whole step's generation.

    One engine on all its GPUs is taken for however many there were. Seconds of a decoding step are those of the
    slowest response where it ran alone, and rise with the batch so that the simulated generation takes as long as the
    measured one. The first step is left out where there are others, as it warms up.

    Args:
        run: The run's folder.
        rollout_gpus: GPUs that generated.
        train_gpus: GPUs that trained, which may be the same ones.

    Raises:
        SettingsError: The folder has no metrics, or they lack what is needed.
    """
    steps = _steps(run / "metrics.jsonl")
    middle = {name: median(step[name] for step in steps if name in step) for name in NEEDED}
    groups = round(middle["rollout/num_groups"])
    responses = round(middle["rollout/num_trajectories"])
    settings = _settings(run / "settings.toml")
    mini_batches = max(1, int(settings.get("trainer", {}).get("minibatches", 1)))
    tokens = responses * (middle["response_length/mean"] + middle["prompt_length/mean"])
    floor = middle["agent_loop/slowest/generate_sequences"] / middle["agent_loop/slowest/response_length"]
    logprobs_s = _median(steps, "timing_s/old_log_prob")
    workload = Workload(
        name=run.resolve().name,
        batch=BatchShape(
            groups=groups,
            group_size=max(1, responses // groups),
            mini_batch_groups=groups // mini_batches if groups % mini_batches == 0 else groups,
        ),
        lengths=_lengths(middle, responses, settings),
        engine=EngineCosts(gpus=rollout_gpus, slots=max(SLOTS, responses), decode=((1, floor), (2, floor))),
        learner=LearnerCosts(
            update_gpu_s_per_token=middle["timing_s/update_actor"] * train_gpus / tokens,
            logprobs_gpu_s_per_token=logprobs_s * train_gpus / tokens,
            sync_step_s=_median(steps, "timing_s/reward") + _median(steps, "timing_s/adv"),
            reference_gpus=train_gpus,
        ),
        weights=WeightCosts(publish_s=_median(steps, "timing_s/update_weights")),
    )
    return _with_slope(workload, floor, gen_s=middle["timing_s/gen"])


def _with_slope(workload: Workload, floor: float, *, gen_s: float) -> Workload:
    """The workload whose decoding rises with the batch so that a step generates for so long.

    Where even one response after another, each as fast as the slowest one alone, would take longer than was measured,
    the slowest one had company: then the floor is lowered in its place.
    """

    def tried(first: float, slope: float) -> tuple[Workload, float]:
        engine = replace(workload.engine, decode=((1, first), (2, first + slope)))
        found = replace(workload, engine=engine)
        return found, simulate_sync(found, gpus=engine.gpus, num_steps=3, seed=0).gen_s

    flat, flat_s = tried(floor, 0.0)
    if flat_s >= gen_s:
        return tried(floor * gen_s / flat_s, 0.0)[0]
    low, high = 0.0, floor
    for _ in range(24):
        slope = (low + high) / 2
        flat, seconds = tried(floor, slope)
        low, high = (low, slope) if seconds > gen_s else (slope, high)
    return flat


def _lengths(middle: Mapping[str, float], responses: int, settings: Mapping[str, Any]) -> Lengths:
    """Log-normal with the measured mean whose longest of so many responses is expected to be the measured one."""
    mean, longest = middle["response_length/mean"], middle["response_length/max"]
    score = NormalDist().inv_cdf(1 - 0.5 / max(2, responses))
    spread = score * score - 2 * math.log(max(1.0, longest / mean))
    sigma = score - math.sqrt(max(0.0, spread))
    limit = settings.get("rollout", {}).get("max_response_tokens", longest)
    return Lengths(
        maximum=max(1, round(limit)),
        median=mean / math.exp(sigma * sigma / 2),
        sigma=sigma,
        prompt_tokens=round(middle["prompt_length/mean"]),
    )


def _steps(file: Path) -> list[dict[str, float]]:
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"the metrics {file} cannot be read: {error}.") from error
    steps = [line for line in lines if isinstance(line, dict) and "timing_s/update_actor" in line]
    steps = steps[1:] or steps
    missing = [name for name in NEEDED if not any(name in step for step in steps)]
    if missing:
        raise SettingsError(
            f"{file} has no step with {', '.join(missing)}; --from needs a run of rl-sync-trainer of at least one step."
        )
    return steps


def _settings(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"the settings {file} cannot be read: {error}.") from error


def _median(steps: Sequence[Mapping[str, float]], name: str) -> float:
    """Over the steps that have it; 0 where none has."""
    return median([step[name] for step in steps if name in step] or [0.0])
