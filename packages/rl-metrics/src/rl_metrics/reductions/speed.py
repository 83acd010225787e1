"""Metrics derived from a step's times: milliseconds per token, and model FLOPs utilization."""

from collections.abc import Mapping

from rl_core.errors import SettingsError
from rl_metrics.definitions.timing import ROLES, TOKEN_PHASES


def per_token_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `timing_per_token_ms/{phase}` for each phase with `timing_s/{phase}` and a token count in the metrics.

    Args:
        metrics: Reduced metrics of a step. `perf/total_num_tokens` counts all tokens, `response_length/mean` times
            `rollout/num_trajectories` those of the responses.
    """
    num_tokens = metrics.get("perf/total_num_tokens", 0.0)
    num_response_tokens = metrics.get("response_length/mean", 0.0) * metrics.get("rollout/num_trajectories", 0.0)
    counts = {"gen": num_response_tokens} | dict.fromkeys(TOKEN_PHASES, num_tokens)
    return {
        f"timing_per_token_ms/{phase}": 1000.0 * metrics[f"timing_s/{phase}"] / count
        for phase, count in counts.items()
        if count > 0 and f"timing_s/{phase}" in metrics
    }


def model_flops_utilization(
    metrics: Mapping[str, float], *, flops: Mapping[str, float], peak_tflops: float, num_devices: int = 1
) -> dict[str, float]:
    """Return `perf/mfu/{role}`, the model's FLOPs over the devices' peak FLOPs in the same time.

    Args:
        metrics: Reduced metrics of a step, with `timing_s/{phase}`.
        flops: FLOPs of the step by role of `ROLES`; a role that trains needs those of 3 forward passes.
        peak_tflops: Peak of one device, in 10**12 FLOPs per second.
        num_devices: Number of devices that share the work.

    Raises:
        SettingsError: peak_tflops or num_devices is not above 0.
    """
    if not (peak_tflops > 0 and num_devices > 0):
        raise SettingsError(
            f"peak_tflops and num_devices must be above 0; found {peak_tflops} and {num_devices}. Use the dense "
            "peak of the dtype from the device's data sheet."
        )
    peak = peak_tflops * 1e12 * num_devices
    seconds = {role: metrics.get(f"timing_s/{ROLES[role]}", 0.0) for role in flops}
    return {f"perf/mfu/{role}": flops[role] / taken / peak for role, taken in seconds.items() if taken > 0}
