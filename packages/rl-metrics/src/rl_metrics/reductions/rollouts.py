"""Metrics of a batch of rollouts and its sessions: pure functions, in float64."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Batch, Timings, Trajectory, are_equal_rewards
from rl_metrics.definitions.gateway import EVENTS

Array = NDArray[Any]

TOKEN_SPREADS = {"advantages": "critic/advantages", "returns": "critic/returns", "values": "critic/values"}
"""Token columns whose mean, maximum and minimum over trained tokens are metrics."""


GATEWAY_TOKENS = ("sampled_tokens", "untrained_tokens", "abandoned_tokens")
ROOTS = "roots_"


def summarize_batch(
    batch: Batch, *, policy_version: int | None = None, max_prompt_tokens: int | None = None
) -> dict[str, float]:
    """Return metrics of a batch's rewards, advantages, lengths, turns, groups and staleness.

    Args:
        batch: Needs input_ids, loss_mask, num_prompt_tokens, reward and is_truncated; uses reward_baseline, advantages,
            returns, values and policy_versions if it has them.
        policy_version: The learner's version; None omits the staleness.
        max_prompt_tokens: Length limit of prompts; None omits `prompt_length/clip_ratio`.

    Returns:
        Metrics by name; only the two counts for a batch without rows.
    """
    metrics = {
        "rollout/num_groups": float(len({key.prompt_uid for key in batch.keys})),
        "rollout/num_trajectories": float(len(batch)),
    }
    if not len(batch):
        return metrics
    mask = batch.ragged("loss_mask").values
    groups = batch.group_index()
    metrics |= summarize_rewards(batch.dense("reward"), group_index=groups)
    if "reward_baseline" in batch:
        of_groups = batch.dense("reward_baseline")[np.unique(groups, return_index=True)[1]]
        metrics["rollout/greedy_reward"] = float(of_groups.mean(dtype=np.float64))
    metrics |= _length_metrics(batch, max_prompt_tokens)
    metrics |= spread("num_turns", count_turns(batch))
    for column, stem in TOKEN_SPREADS.items():
        if column in batch:
            metrics |= spread(stem, batch.ragged(column).values[mask])
    if policy_version is not None and "policy_versions" in batch:
        metrics |= _staleness_metrics(batch, policy_version)
    return metrics


def count_turns(batch: Batch) -> NDArray[np.int64]:
    """Return the [N] number of turns of each trajectory: prompt, responses, and answers of tools or environments.

    A turn is a run of tokens that were all sampled, or all not: 2 for a prompt with a response, 1 without a response.

    Args:
        batch: Needs loss_mask.
    """
    mask = batch.ragged("loss_mask")
    changes = np.empty(len(mask.values), dtype=np.bool_)
    changes[1:] = mask.values[1:] != mask.values[:-1]
    changes[mask.offsets[:-1][mask.lengths > 0]] = True  # each row starts a turn
    before = np.concatenate([[0], np.cumsum(changes)])
    return np.asarray(before[mask.offsets[1:]] - before[mask.offsets[:-1]], dtype=np.int64)


def summarize_rewards(rewards: Array, *, group_index: Array) -> dict[str, float]:
    """Return metrics of rewards over trajectories and within groups.

    Args:
        rewards: [N] float, reward of each trajectory; NaN without one, which counts only in
            `rollout/unscored_trajectories`.
        group_index: [N] int, group of each row, from 0.

    Returns:
        `critic/{score,rewards}/*`, the share of positive rewards, and the spread within groups of two or more scored
        trajectories.
    """
    is_scored = ~np.isnan(rewards)
    scored, groups = rewards[is_scored].astype(np.float64), group_index[is_scored]
    metrics = {"rollout/unscored_trajectories": float((~is_scored).sum())}
    if not len(scored):
        return metrics
    metrics |= spread("critic/score", scored) | spread("critic/rewards", scored)
    metrics["rollout/positive_reward_ratio"] = float((scored > 0).mean())
    stds = group_stds(scored, groups)
    if len(stds):
        order = np.lexsort((scored, groups))
        _, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
        starts, counts = starts[counts >= 2], counts[counts >= 2]
        is_equal = are_equal_rewards(scored[order[starts]], scored[order[starts + counts - 1]])
        metrics["rollout/groups_without_spread_ratio"] = float(is_equal.mean())
        metrics["rollout/group_reward_std"] = float(stds.mean())
    return metrics


def group_stds(values: Array, group_index: Array) -> Array:
    """Return the standard deviation within each group of two or more values; [N] groups may be any integers."""
    _, groups, counts = np.unique(group_index, return_inverse=True, return_counts=True)
    means = np.bincount(groups, weights=values) / counts
    variances = np.bincount(groups, weights=(values - means[groups]) ** 2) / counts
    stds: Array = np.sqrt(variances[counts >= 2])
    return stds


def summarize_components(components: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return `reward/{component}/{mean,max,min}` over the trajectories that have the component."""
    names = dict.fromkeys(name for row in components for name in row)
    metrics: dict[str, float] = {}
    for name in names:
        metrics |= spread(f"reward/{name}", np.asarray([row[name] for row in components if name in row]))
    return metrics


def summarize_timings(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return `agent_loop/*`: min, mean and max of the trajectories' times, and those of the slowest with its lengths.

    Returns:
        Metrics by name; empty without a trajectory. The slowest is the one with the largest generate + tools + reward
        time.
    """
    if not trajectories:
        return {}
    timings = [trajectory.timings for trajectory in trajectories]
    costs = {
        "generate_sequences": np.asarray([t.generate_s for t in timings]),
        "tool_calls": np.asarray([t.tools_s for t in timings]),
        "compute_score": np.asarray([t.reward_s for t in timings]),
        "num_preempted": np.asarray([t.preemptions for t in timings], dtype=np.float64),
    }
    metrics: dict[str, float] = {}
    for name, values in costs.items():
        metrics |= spread(f"agent_loop/{name}", values)
    slowest = slowest_trajectory(timings)
    metrics |= {f"agent_loop/slowest/{name}": float(values[slowest]) for name, values in costs.items()}
    metrics["agent_loop/slowest/prompt_length"] = float(trajectories[slowest].num_prompt_tokens)
    metrics["agent_loop/slowest/response_length"] = float(trajectories[slowest].num_response_tokens)
    return metrics


def summarize_tool_calls(sessions: Iterable[Any]) -> dict[str, float]:
    """Return `tools/*` of a step's sessions.

    Args:
        sessions: Each session's number of calls by outcome. Values that are not mappings, from sessions without tools,
            are ignored.

    Returns:
        Metrics by name; empty without a session with tools. Without a call, only the two counts.
    """
    told = [one for one in sessions if isinstance(one, Mapping)]
    if not told:
        return {}
    counts = Counter({"ok": 0, "malformed_call": 0})  # a curve needs its zeros
    for one in told:
        counts.update({outcome: number for outcome, number in one.items() if isinstance(number, int)})
    metrics = {f"tools/calls/{outcome}": float(number) for outcome, number in sorted(counts.items())}
    if num_calls := counts.total():
        metrics["tools/ok_share"] = (counts["ok"] + counts["truncated"]) / num_calls
    return metrics


def summarize_gateway(sessions: Iterable[Any]) -> dict[str, float]:
    """Return `gateway/*` of a step's sessions.

    Args:
        sessions: The gateway's report of each session: counts by name, and "overhead_ms" with one number per turn.
            Values that are not mappings, from sessions without a gateway, are ignored.

    Returns:
        Metrics by name; empty without a session.
    """
    told = [one for one in sessions if isinstance(one, Mapping)]
    if not told:
        return {}
    counts: Counter[str] = Counter()
    for one in told:
        counts.update({name: value for name, value in one.items() if _is_number(value)})
    roots = {name.removeprefix(ROOTS): value for name, value in counts.items() if name.startswith(ROOTS)}
    turns = [value for one in told if _is_number(value := one.get("turns"))]
    metrics = {
        **spread("gateway/turns", np.array(turns, dtype=np.float64)),
        "gateway/forks": counts["forks"] / len(told),
        "gateway/roots": sum(roots.values()) / len(told),
        **{f"gateway/roots/{reason}": float(number) for reason, number in sorted(roots.items())},
        **{f"gateway/{name}": float(counts[name]) for name in (*GATEWAY_TOKENS, *EVENTS)},
    }
    if counts["turns"]:
        metrics["gateway/new_root_share"] = (sum(roots.values()) - roots.get("first", 0)) / counts["turns"]
    took = [session["overhead_ms"] for session in told if isinstance(session.get("overhead_ms"), list)]
    overheads = [value for values in took for value in values if _is_number(value)]
    for name, quantile in (("p50", 0.5), ("p99", 0.99)) if overheads else ():
        metrics[f"gateway/overhead_ms/{name}"] = float(np.quantile(overheads, quantile))
    return metrics


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def slowest_trajectory(timings: Sequence[Timings]) -> int:
    """Return the index of the first trajectory with the largest generate + tools + reward time."""
    return int(np.argmax([timing.generate_s + timing.tools_s + timing.reward_s for timing in timings]))


def summarize_speed(*, num_tokens: int, num_trajectories: int, step_s: float, num_devices: int = 1) -> dict[str, float]:
    """Return `perf/*` of a step of `step_s` seconds; empty if it took no time."""
    if step_s <= 0:
        return {}
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": step_s,
        "perf/throughput": num_tokens / step_s / num_devices,
        "perf/samples_per_s": num_trajectories / step_s,
    }


def spread(stem: str, values: Array) -> dict[str, float]:
    """Return `{stem}/{mean,max,min}` of values of any shape; empty without values."""
    if values.size == 0:
        return {}
    return {
        f"{stem}/mean": float(values.mean(dtype=np.float64)),
        f"{stem}/max": float(values.max()),
        f"{stem}/min": float(values.min()),
    }


def _length_metrics(batch: Batch, max_prompt_tokens: int | None) -> dict[str, float]:
    tokens = batch.ragged("input_ids")
    prompt_lengths = batch.dense("num_prompt_tokens").astype(np.int64)
    metrics = spread("prompt_length", prompt_lengths) | spread("response_length", tokens.lengths - prompt_lengths)
    metrics["response_length/clip_ratio"] = float(batch.dense("is_truncated").mean())
    if max_prompt_tokens is not None:
        metrics["prompt_length/clip_ratio"] = float((prompt_lengths >= max_prompt_tokens).mean())
    mask = batch.ragged("loss_mask")
    rows = np.repeat(np.arange(len(batch)), mask.lengths)
    trained = np.bincount(rows[mask.values], minlength=len(batch))
    metrics["response/aborted_ratio"] = float((trained == 0).mean())
    return metrics


def _staleness_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    versions, mask = batch.ragged("policy_versions"), batch.ragged("loss_mask").values
    starts = versions.offsets[:-1][versions.lengths > 0]
    untrained = policy_version + 1
    oldest = np.minimum.reduceat(np.where(mask, versions.values.astype(np.int64), untrained), starts)
    return spread("training/staleness", policy_version - oldest[oldest < untrained])
