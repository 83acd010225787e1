"""Reductions of a step's batch, micro-batches and ranks to metrics."""

from rl_metrics.reductions.async_training import summarize_processing_times, summarize_staleness
from rl_metrics.reductions.distributions import batch_distributions, timing_distributions
from rl_metrics.reductions.hardware import (
    MemoryWatch,
    memory_metrics,
    model_flops_utilization,
    per_token_times,
    summarize_gpus,
)
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.reductions.mismatch import summarize_mismatch
from rl_metrics.reductions.recorder import Recorder
from rl_metrics.reductions.rollouts import (
    slowest_trajectory,
    spread,
    summarize_batch,
    summarize_components,
    summarize_gateway,
    summarize_rewards,
    summarize_speed,
    summarize_timings,
    summarize_tool_calls,
)

__all__ = [
    "Histogram",
    "MemoryWatch",
    "Recorder",
    "batch_distributions",
    "memory_metrics",
    "model_flops_utilization",
    "per_token_times",
    "slowest_trajectory",
    "spread",
    "summarize_batch",
    "summarize_components",
    "summarize_gateway",
    "summarize_gpus",
    "summarize_mismatch",
    "summarize_processing_times",
    "summarize_rewards",
    "summarize_speed",
    "summarize_staleness",
    "summarize_timings",
    "summarize_tool_calls",
    "timing_distributions",
]
