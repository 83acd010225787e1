"""Speed metrics of a step: milliseconds per token and share of the devices' peak."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from rl_core import Batch
from rl_distill import PolicyConfig, forward_flops
from rl_metrics.reductions import model_flops_utilization, per_token_times
from rl_trainer_parts.learning.start_learners import model_config
from rl_trainer_parts.settings.schema import Settings

TRAINING_PASSES = 3
"""FLOPs of a backward pass, in forward passes."""


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


@lru_cache(maxsize=4)
def _config(folder: Path) -> PolicyConfig:
    return model_config(folder)
