"""Metrics of a step's batch, sessions and speed, in both trainers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from rl_core import Batch
from rl_core.data import Timings, Trajectory
from rl_distill import forward_flops
from rl_metrics.reductions import (
    MemoryWatch,
    model_flops_utilization,
    per_token_times,
    slowest_trajectory,
    spread,
    summarize_batch,
    summarize_gateway,
    summarize_mismatch,
    summarize_speed,
    summarize_tool_calls,
)
from rl_rollout import GroupResult
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.settings.schema import Settings

TRAINING_PASSES = 3
"""FLOPs of a backward pass, in forward passes."""

_config = lru_cache(maxsize=4)(model_config)


def summarize_step(settings: Settings, batch: Batch, *, version: int, step_s: float) -> dict[str, float]:
    """Rewards, lengths, staleness, mismatch and speed of a step's batch.

    Args:
        settings: The run's settings.
        batch: The trained batch; it has `old_logprobs` only if they were recomputed.
        version: Policy version at the start of the step.
        step_s: Duration of the step in seconds.
    """
    num_tokens = len(batch.ragged("input_ids").values)
    has_rewards = "reward" in batch
    if not has_rewards:
        batch = batch.with_columns({"reward": np.full(len(batch), np.nan, dtype=np.float32)})
    sampled_by = None if settings.distillation.texts is not None else version
    values: dict[str, float] = {
        **summarize_batch(batch, policy_version=sampled_by, max_prompt_tokens=settings.prompts.max_tokens),
        **summarize_speed(num_tokens=num_tokens, num_trajectories=len(batch), step_s=step_s),
        "training/policy_version": version + 1,
    }
    if not has_rewards:  # stored texts, which nothing scores: none is missing
        del values["rollout/unscored_trajectories"]
    if "old_logprobs" in batch:
        values |= summarize_mismatch(batch)
    if "token_rewards" in batch:
        sums = np.asarray([row.sum(dtype=np.float64) for row in batch.ragged("token_rewards")])
        values |= spread("critic/rewards", batch.dense("reward") + sums)
    return values


def make_memory_watch(settings: Settings, owner: str, *, say: Callable[..., None] | None = None) -> MemoryWatch:
    """Measures this process's memory as often as the settings ask for.

    Args:
        settings: The run's settings.
        owner: This process's role.
        say: Logs an event; None records no lines of code.
    """
    chosen = settings.metrics
    return MemoryWatch(owner, say=say, every=chosen.details_every, is_traced=chosen.trace_memory)


def summarize_sessions(groups: Sequence[GroupResult]) -> dict[str, float]:
    """Audit findings of the groups' sessions, and the counts of the gateway and of tool calls."""
    told = [one.trajectories[-1].extras for group in groups for one in group.sessions if one.trajectories]
    rescored = [group.rescored for group in groups]
    metrics = {
        "rollout/audited_sessions": float(sum(group.num_audited for group in groups)),
        "rollout/audit_failures": float(sum(group.num_audit_failures for group in groups)),
        "rollout/rescored_sessions": float(sum(one.num_sessions for one in rescored)),
        "rollout/rescored_skipped": float(sum(one.num_skipped for one in rescored)),
        **summarize_gateway(extras.get("gateway") for extras in told),
        **summarize_tool_calls(extras.get("tool_calls") for extras in told),
    }
    if num_tokens := sum(one.num_tokens for one in rescored):
        metrics["rollout/rescored_diff_mean"] = sum(one.sum_diff for one in rescored) / num_tokens
        metrics["rollout/rescored_diff_max"] = max(one.max_diff for one in rescored)
    return metrics


def reward_times(timings: Sequence[Timings]) -> dict[str, float]:
    """Mean seconds of a session's reward, and of the wait for it; empty without a session."""
    if not timings:
        return {}
    return {
        "timing_s/reward": math.fsum(one.reward_s for one in timings) / len(timings),
        "timing_s/reward_wait": math.fsum(one.reward_wait_s for one in timings) / len(timings),
    }


def slowest_session(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Fields of the event `slowest_session`: the session, and how its time was spent."""
    slowest = trajectories[slowest_trajectory([trajectory.timings for trajectory in trajectories])]
    return {
        "prompt_uid": slowest.prompt_uid,
        "session_index": slowest.session_index,
        "output_index": slowest.output_index,
        "prompt_tokens": slowest.num_prompt_tokens,
        "response_tokens": slowest.num_response_tokens,
        **asdict(slowest.timings),
    }


def with_speeds(settings: Settings, metrics: Mapping[str, float], batch: Batch) -> dict[str, float]:
    """A step's metrics plus `timing_per_token_ms/*` and, if `metrics.peak_tflops` is set, `perf/mfu/*`.

    Args:
        settings: The run's settings.
        metrics: The step's metrics, with the times of its phases.
        batch: The trained batch.
    """
    found = dict(metrics) | per_token_times(metrics)
    peak_tflops = settings.metrics.peak_tflops
    if peak_tflops is None:
        return found
    lengths = batch.ragged("input_ids").lengths.tolist()
    policy = _config(settings.policy.path)
    forward = forward_flops(policy, lengths)
    trained = TRAINING_PASSES * settings.trainer.epochs
    flops = {"actor": trained * forward, "actor_infer": forward, "ref": forward}
    if "timing_s/update_critic" in metrics:
        critic = _config(settings.critic.path or settings.policy.path)
        flops["critic"] = trained * forward_flops(critic, lengths, has_head=False)
    devices = settings.parallel.ranks
    return found | model_flops_utilization(metrics, flops=flops, peak_tflops=peak_tflops, num_devices=devices)
