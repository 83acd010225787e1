"""Simulated workload: batch, response lengths, and costs in seconds; read from TOML."""

import math
from collections.abc import Mapping
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray

from rl_core.errors import SettingsError
from rl_core.files import read_toml
from rl_core.record_fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
    converts_arguments,
    settings_record,
)
from rl_rollout.loops.options import read_options

BUILT_IN = Path(__file__).with_name("workloads") / "qwen2.5-math-7b-dapo.toml"
Points = tuple[tuple[float, float], ...]
LENGTHS_BLOCK = 256
"""Number of groups drawn at once."""


@settings_record
class BatchShape:
    """Groups that a synchronous step trains, which the asynchronous trainer trains in one policy version.

    Attributes:
        groups: Number of prompts.
        group_size: Number of sessions per prompt.
        mini_batch_groups: Number of groups per optimizer update.
    """

    groups: PositiveInt
    group_size: PositiveInt
    mini_batch_groups: PositiveInt

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: The batch is not a whole number of mini-batches.
        """
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

    maximum: PositiveInt
    median: PositiveFloat | None = None
    sigma: NonNegativeFloat | None = None
    quantiles: Points = ()
    group_correlation: UnitFloat = 0.0
    prompt_tokens: NonNegativeInt = 0
    scale: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: Both or neither form is given, or shares or tokens decrease.
        """
        given = self.median is not None, self.sigma is not None, bool(self.quantiles)
        if given not in ((True, True, False), (False, False, True)):
            raise SettingsError("lengths needs either median and sigma, or quantiles.")
        if self.quantiles and not (_rises(self.quantiles) and [self.quantiles[i][0] for i in (0, -1)] == [0, 1]):
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

    gpus: PositiveInt
    slots: PositiveInt
    decode: Points
    prefill_s_per_token: NonNegativeFloat = 0.0
    inflight_groups: PositiveInt | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: The curve is empty or not increasing.
        """
        if not self.decode or not _rises(self.decode):
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

    def generation_seconds(self, num_tokens: int, *, num_engines: int) -> float:
        """Return the minimum seconds to decode this many tokens: all engines always have their best batch size."""
        rates = [batch / seconds for batch, seconds in enumerate(self.step_seconds())]
        return num_tokens / (max(rates) * num_engines)


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

    update_gpu_s_per_token: PositiveFloat
    update_s: NonNegativeFloat = 0.0
    logprobs_gpu_s_per_token: NonNegativeFloat = 0.0
    logprobs_s: NonNegativeFloat = 0.0
    step_s: NonNegativeFloat = 0.0
    sync_step_s: NonNegativeFloat = 0.0
    colocated_slowdown: Annotated[float, Ge(1), Lt(math.inf)] = 1.0
    efficiency_per_doubling: Annotated[float, Gt(0), Le(1)] = 1.0
    reference_gpus: PositiveInt = 1
    gpus_multiple: PositiveInt = 1
    recomputes_logprobs: bool = False

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

    publish_s: NonNegativeFloat = 0.0
    swap_s: NonNegativeFloat = 0.0
    recomputes_prefixes: bool = True


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


class GroupLengths:
    """Number of tokens of each response, by group number from 0: the same lengths in every simulation of a seed."""

    def __init__(self, lengths: Lengths, *, group_size: int, seed: int) -> None:
        """Store the distribution. Nothing is drawn yet."""
        self._lengths = lengths
        self._group_size = group_size
        self._seed = seed
        self._blocks: dict[int, list[list[int]]] = {}

    def __getitem__(self, group: int) -> list[int]:
        """Return the number of tokens of each response of the group, from 1 to the maximum."""
        block, row = divmod(group, LENGTHS_BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block).tolist()
        return self._blocks[block][row]

    def num_tokens(self, group: int) -> int:
        """Return the number of trained tokens of a group: its responses with their prompts."""
        return sum(self[group]) + self._group_size * self._lengths.prompt_tokens

    def _draw(self, block: int) -> NDArray[np.int64]:
        """Draw [LENGTHS_BLOCK, group_size] lengths."""
        rng = np.random.default_rng([self._seed, block])
        shared = self._lengths.group_correlation
        of_group = rng.standard_normal((LENGTHS_BLOCK, 1))
        own = rng.standard_normal((LENGTHS_BLOCK, self._group_size))
        scores = math.sqrt(shared) * of_group + math.sqrt(1 - shared) * own
        tokens = np.exp(self._logarithms(scores)) * self._lengths.scale
        return np.clip(np.rint(tokens), 1, self._lengths.maximum).astype(np.int64)

    def _logarithms(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        lengths = self._lengths
        if lengths.median is not None and lengths.sigma is not None:
            return np.asarray(math.log(lengths.median) + lengths.sigma * scores, dtype=np.float64)
        normal = NormalDist()
        shares = np.array([normal.cdf(score) for score in scores.ravel().tolist()]).reshape(scores.shape)
        known, tokens = zip(*lengths.quantiles, strict=True)
        return np.asarray(np.interp(shares, known, np.log(tokens)), dtype=np.float64)


@converts_arguments
def read_workload(file: Path = BUILT_IN) -> Workload:
    """Read a workload from TOML.

    Raises:
        SettingsError: The file cannot be read, is not TOML, or has an invalid value.
    """
    return workload_from(read_toml(file, error=SettingsError), where=str(file))


def workload_from(table: Mapping[str, Any], *, where: str) -> Workload:
    """Make a workload from a table in the format of a workload's file; errors begin with `where`.

    Raises:
        SettingsError: A value is invalid.
    """
    try:
        return read_options(Workload, table, where="the workload")
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from error


def _rises(points: Points) -> bool:
    """True if the first numbers rise from 0 or more, and the second ones are above 0 and do not decrease."""
    grows = all(a < b and low <= high for (a, low), (b, high) in pairwise(points))
    return grows and points[0][0] >= 0 and points[0][1] > 0
