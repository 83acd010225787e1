"""Simulated workload: batch, response lengths, and costs in seconds."""

import math
from dataclasses import field
from itertools import pairwise

from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record


@settings_record
class BatchShape:
    """Groups that a synchronous step trains, which the asynchronous trainer trains in one policy version.

    Attributes:
        groups: Number of prompts.
        group_size: Number of sessions per prompt.
        mini_batch_groups: Number of groups per optimizer update.
    """

    groups: int
    group_size: int
    mini_batch_groups: int

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: A number is below 1, or the batch is not a whole number of mini-batches.
        """
        _require_at_least(1, "batch", groups=self.groups, group_size=self.group_size)
        _require_at_least(1, "batch", mini_batch_groups=self.mini_batch_groups)
        if self.groups % self.mini_batch_groups:
            raise SettingsError(
                f"batch.groups must be a multiple of batch.mini_batch_groups; found {self.groups} and "
                f"{self.mini_batch_groups}."
            )

    def groups_per_step(self, sync_every: int) -> int:
        """Return the number of groups per learner step, with `sync_every` steps per version.

        Raises:
            SettingsError: A step would not be a whole number of mini-batches.
        """
        if sync_every < 1 or self.groups % (sync_every * self.mini_batch_groups):
            raise SettingsError(
                f"sync_every must divide the {self.groups // self.mini_batch_groups} mini-batches of a version "
                f"(batch.groups / batch.mini_batch_groups); found {sync_every}."
            )
        return self.groups // sync_every


@settings_record
class Lengths:
    """Distribution of response lengths: log-normal or by quantiles, cut at the maximum.

    Attributes:
        maximum: Maximum number of tokens in a response.
        median: Median of the log-normal distribution, in tokens.
        sigma: Standard deviation of its natural logarithm.
        quantiles: Pairs of a share and the maximum tokens of that share of the responses, instead of `median` and
            `sigma`. The logarithm of the tokens is interpolated linearly.
        group_correlation: Correlation of the normal scores of a prompt's responses; 0 makes them independent of the
            prompt.
        prompt_tokens: Number of tokens in each prompt.
        scale: Factor of all lengths before the cut.
    """

    maximum: int
    median: float | None = None
    sigma: float | None = None
    quantiles: tuple[tuple[float, float], ...] = ()
    group_correlation: float = 0.0
    prompt_tokens: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: Both or neither form is given, shares or tokens decrease, or a number is out of range.
        """
        _require_at_least(1, "lengths", maximum=self.maximum)
        _require_at_least(0, "lengths", prompt_tokens=self.prompt_tokens)
        _require_positive("lengths", scale=self.scale)
        if not 0 <= self.group_correlation <= 1:
            raise SettingsError(f"lengths.group_correlation must be from 0 to 1; found {self.group_correlation}.")
        is_log_normal = self.median is not None and self.sigma is not None
        if is_log_normal == bool(self.quantiles) or (self.median is None) != (self.sigma is None):
            raise SettingsError("lengths needs either median and sigma, or quantiles.")
        if self.median is not None and self.sigma is not None:
            _require_positive("lengths", median=self.median)
            _require_at_least(0, "lengths", sigma=self.sigma)
            return
        shares, tokens = zip(*self.quantiles, strict=True)
        rises = all(a < b for a, b in pairwise(shares))
        if shares[0] != 0 or shares[-1] != 1 or not rises or list(tokens) != sorted(tokens) or tokens[0] <= 0:
            raise SettingsError(
                "lengths.quantiles must be pairs [share, tokens] with shares that rise from 0 to 1 and tokens above 0 "
                f"that do not decrease; found {[list(pair) for pair in self.quantiles]}."
            )


@settings_record
class EngineCosts:
    """Costs of an engine.

    Attributes:
        gpus: Number of GPUs per engine (tensor parallel size).
        slots: Maximum number of responses decoded at once; more wait.
        decode: Pairs of responses decoded at once and measured seconds per decoding step, interpolated linearly, and
            extrapolated from the last two pairs.
        prefill_s_per_token: Seconds per prompt token.
        inflight_groups: Maximum number of groups generated at once per engine; None leaves the limit to the staleness.
    """

    gpus: int
    slots: int
    decode: tuple[tuple[float, float], ...]
    prefill_s_per_token: float = 0.0
    inflight_groups: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: The curve is empty or not increasing, or a number is out of range.
        """
        _require_at_least(1, "engine", gpus=self.gpus, slots=self.slots)
        _require_at_least(0, "engine", prefill_s_per_token=self.prefill_s_per_token)
        if self.inflight_groups is not None:
            _require_at_least(1, "engine", inflight_groups=self.inflight_groups)
        batches = [batch for batch, _ in self.decode]
        seconds = [second for _, second in self.decode]
        rises = all(a < b for a, b in pairwise(batches))
        if not self.decode or not rises or seconds != sorted(seconds) or seconds[0] <= 0 or batches[0] < 0:
            raise SettingsError(
                "engine.decode must be pairs [responses, seconds] with responses that rise and seconds above 0 that "
                f"do not decrease; found {[list(pair) for pair in self.decode]}."
            )

    def step_seconds(self) -> list[float]:
        """Return the seconds of one decoding step, by number of responses decoded at once, from 0 to `slots`."""
        points = self.decode
        if len(points) == 1:
            return [points[0][1]] * (self.slots + 1)
        found, segment = [], 0
        for batch in range(self.slots + 1):
            while segment < len(points) - 2 and batch > points[segment + 1][0]:
                segment += 1
            (left, low), (right, high) = points[segment], points[segment + 1]
            found.append(low if batch <= left else low + (high - low) * (batch - left) / (right - left))
        return found


@settings_record
class LearnerCosts:
    """Costs of the learner.

    Attributes:
        update_gpu_s_per_token: GPU-seconds per token of prompt or response, forward and backward.
        update_s: Seconds per optimizer update, for any number of GPUs.
        logprobs_gpu_s_per_token: GPU-seconds per token to recompute logprobs.
        logprobs_s: Seconds per step that recomputes logprobs, for any number of GPUs.
        step_s: Other seconds per step of the asynchronous learner, such as collecting its batch.
        sync_step_s: Other seconds per synchronous step: rewards and advantages.
        colocated_slowdown: Slowdown of updates if engines share the GPUs, because optimizer states are kept in host
            memory.
        efficiency_per_doubling: Factor of the speed per GPU with each doubling of GPUs beyond `reference_gpus`.
        reference_gpus: Number of GPUs at which the GPU-seconds were measured.
        gpus_multiple: The learner's number of GPUs must be a multiple of this.
        recomputes_logprobs: Whether the asynchronous learner also recomputes logprobs. The synchronous learner always
            does.
    """

    update_gpu_s_per_token: float
    update_s: float = 0.0
    logprobs_gpu_s_per_token: float = 0.0
    logprobs_s: float = 0.0
    step_s: float = 0.0
    sync_step_s: float = 0.0
    colocated_slowdown: float = 1.0
    efficiency_per_doubling: float = 1.0
    reference_gpus: int = 1
    gpus_multiple: int = 1
    recomputes_logprobs: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: A number is out of range.
        """
        _require_positive("learner", update_gpu_s_per_token=self.update_gpu_s_per_token)
        _require_at_least(0, "learner", update_s=self.update_s, logprobs_s=self.logprobs_s, step_s=self.step_s)
        _require_at_least(0, "learner", logprobs_gpu_s_per_token=self.logprobs_gpu_s_per_token)
        _require_at_least(0, "learner", sync_step_s=self.sync_step_s)
        _require_at_least(1, "learner", gpus_multiple=self.gpus_multiple, reference_gpus=self.reference_gpus)
        _require_at_least(1, "learner", colocated_slowdown=self.colocated_slowdown)
        if not 0 < self.efficiency_per_doubling <= 1:
            raise SettingsError(
                f"learner.efficiency_per_doubling must be above 0 and at most 1; found {self.efficiency_per_doubling}."
            )

    def updates_seconds(self, num_tokens: int, *, num_updates: int, gpus: int) -> float:
        """Return the seconds of a step's optimizer updates, on GPUs that only train."""
        return num_tokens * self.update_gpu_s_per_token / self._speed(gpus) + num_updates * self.update_s

    def logprobs_seconds(self, num_tokens: int, *, gpus: int) -> float:
        """Return the seconds of recomputing logprobs."""
        return num_tokens * self.logprobs_gpu_s_per_token / self._speed(gpus) + self.logprobs_s

    def _speed(self, gpus: int) -> float:
        """Return the speed in units of one GPU."""
        doublings = max(0.0, math.log2(gpus / self.reference_gpus))
        return gpus * math.pow(self.efficiency_per_doubling, doublings)


@settings_record
class WeightCosts:
    """Costs of a weight update.

    Attributes:
        publish_s: Seconds that the learner spends on it.
        swap_s: Seconds in which engines do not generate.
        recomputes_prefixes: Whether responses that continue under new weights are prefilled again.
    """

    publish_s: float = 0.0
    swap_s: float = 0.0
    recomputes_prefixes: bool = True

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: A time is below 0.
        """
        _require_at_least(0, "weights", publish_s=self.publish_s, swap_s=self.swap_s)


@settings_record
class Workload:
    """One training job and its costs.

    Attributes:
        name: Name for reports.
        batch: Groups per step.
        lengths: Distribution of response lengths.
        engine: Costs of generation.
        learner: Costs of training.
        weights: Costs of weight updates.
    """

    name: str
    batch: BatchShape
    lengths: Lengths
    engine: EngineCosts
    learner: LearnerCosts
    weights: WeightCosts = field(default_factory=WeightCosts)


def _require_at_least(least: float, section: str, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise SettingsError(f"{section}.{name} must be at least {least}; found {value}.")


def _require_positive(section: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise SettingsError(f"{section}.{name} must be above 0; found {value}.")
