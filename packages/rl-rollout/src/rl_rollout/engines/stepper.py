"""The parts of an engine that decodes in steps: samples, and the model that extends them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from rl_core.data import ExpertArray, FinishReason, FloatArray, IntArray
from rl_core.errors import EngineError
from rl_core.weights import TokenScores, WeightReceipt, WeightUpdate
from rl_rollout.engines.images import PlacedImage
from rl_rollout.engines.protocol import EngineTraits, Generation, NewTokens, SamplingParams, Structure
from rl_rollout.engines.response_text import ResponseText


@dataclass(slots=True, eq=False, kw_only=True)
class Sample:
    """A sequence in progress. The stepper fills it.

    Attributes:
        input_ids: The prompt, or the sequence to score.
        sampling: Sampling parameters. None to score.
        seed: Seed of this sample.
        request_id: Id of its request, if any.
        adapter: See `GenerateRequest.adapter`.
        top_k: Number of top tokens per position, when scored.
        with_experts: Report its experts too, when scored.
        images: Images among input_ids, in their order.
        pixel_digest: See `Generation.pixel_digest`.
        token_ids: Tokens sampled so far.
        logprobs: Logprobs of token_ids; empty when greedy.
        policy_versions: Policy versions of token_ids.
        nucleus_ids: [max_nucleus] kept tokens of each of token_ids, if requested.
        finish_reason: None while it runs.
        num_preempted: Number of restarts.
        scores: Scores of input_ids, with top_k more columns on request.
        routed_experts: Experts of input_ids and token_ids, once it has ended. None if the stepper does not report them.
        failure: Why it ended without a valid result; set by the stepper.
        text: Text to search for its stop strings; None without any. The stepper does not use it.
    """

    input_ids: list[int]
    sampling: SamplingParams | None
    seed: int | None = None
    request_id: str | None = None
    adapter: str | None = None
    top_k: int = 0
    with_experts: bool = False
    images: tuple[PlacedImage, ...] = ()
    pixel_digest: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    nucleus_ids: list[IntArray] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_preempted: int = 0
    scores: TokenScores | None = None
    routed_experts: ExpertArray | None = None
    failure: str | None = None
    text: ResponseText | None = None
    _num_searched: int = 0
    _num_told: int | None = 0

    @property
    def max_nucleus(self) -> int:
        """Maximum number of kept tokens to report at each position; 0 to report none."""
        return self.sampling.max_nucleus or 0 if self.sampling is not None and self.sampling.temperature else 0

    def add_nucleus(self, token_ids: IntArray, logprobs: FloatArray) -> None:
        """Note the tokens from which the next one was sampled. If they are too many, the sample will fail.

        Args:
            token_ids: [N] most likely tokens in descending order, one more than max_nucleus unless there are no more.
            logprobs: [N] float32, -inf for tokens that were not kept.
        """
        is_kept = np.isfinite(logprobs)
        if is_kept[self.max_nucleus :].any():
            self.failure = (
                f"top_k and top_p kept more than max_nucleus = {self.max_nucleus} tokens at token "
                f"{len(self.nucleus_ids)} of a response; tokens as likely as the last of top_k count too. Raise "
                "max_nucleus, or lower top_p."
            )
        row = np.full(self.max_nucleus, -1, np.int32)
        row[: len(token_ids)] = np.where(is_kept, token_ids, -1)[: self.max_nucleus]
        self.nucleus_ids.append(row)

    def find_stop(self) -> bool:
        """Search for a stop string in the tokens sampled since the last call."""
        if self.text is None:
            return False
        self.text.feed(self.token_ids[self._num_searched :])
        self._num_searched = len(self.token_ids)
        return self.text.matched_stop is not None

    def news(self, index: int) -> NewTokens | None:
        """Return the tokens sampled since the last call, for the sample at this index. None if there are none."""
        begin = self._num_told
        if begin is None or self.failure is not None or (begin == len(self.token_ids) and self.finish_reason is None):
            return None
        has_ended = self.finish_reason is not None
        token_ids, logprobs, versions = self._arrays(begin)
        self._num_told = None if has_ended else begin + len(token_ids)
        return NewTokens(
            sample_index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=versions,
            ended=self.generation() if has_ended else None,
        )

    def fail(self, reason: str) -> None:
        """End it without a valid result."""
        self.failure, self.finish_reason = reason, "abort"

    def generation(self) -> Generation:
        """Return the finished sample as a `Generation`."""
        token_ids, logprobs, versions = self._arrays(0)
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=versions,
            finish_reason=self.finish_reason or "abort",
            num_preempted=self.num_preempted,
            routed_experts=self.routed_experts,
            nucleus_ids=np.stack(self.nucleus_ids) if self.nucleus_ids else None,
            matched_stop=None if self.text is None else self.text.matched_stop,
            pixel_digest=self.pixel_digest,
        )

    def _arrays(self, begin: int) -> tuple[IntArray, FloatArray, IntArray]:
        """Return the tokens from this index on, with their logprobs and versions."""
        token_ids = np.array(self.token_ids[begin:], dtype=np.int32)
        logprobs = np.array(self.logprobs[begin:] or np.zeros(len(token_ids)), dtype=np.float32)
        return token_ids, logprobs, np.array(self.policy_versions[begin:], dtype=np.int32)


class Stepper(Protocol):
    """A loaded model that decodes many samples at once. One thread creates and calls it, one call at a time."""

    @property
    def traits(self) -> EngineTraits:
        """Properties of the engine."""

    def admit(self, samples: Sequence[Sample]) -> None:
        """Add new samples, in this order."""

    def step(self) -> list[Sample]:
        """Advance every sample by one step. Return the samples that finished, with their finish_reason."""

    def remove(self, samples: Sequence[Sample]) -> None:
        """Drop samples. Unknown ones are ignored."""

    def sleep(self, level: Literal[1, 2]) -> None:
        """Free memory. Called only without samples, and if traits.can_sleep. Level 2 drops the weights."""

    def wake(self) -> None:
        """Allocate the memory again. After level 2, no requests come before an update of all weights."""

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Replace all weights, or the adapter. Affected samples continue under the new weights.

        Raises:
            EngineError: The update is refused and nothing changed. Any other error is a failure.
        """

    def drop_adapter(self, name: str) -> None:
        """Free an adapter's slot. The next step ends its samples with a failure.

        Raises:
            EngineError: There is no adapter of this name.
        """

    def prepare(self, structure: Structure) -> None:
        """Compile a structure. Called in its own thread, only for kinds in traits.structures.

        Raises:
            EngineError: The structure cannot be enforced.
        """

    def close(self) -> None:
        """Free all resources."""


class SleepState:
    """Sleep state of one engine. After a level 2 sleep, the next update of all weights restores them.

    Attributes:
        is_asleep: Whether its memory is freed.
        lacks_weights: Whether its weights were dropped and not yet restored.
    """

    def __init__(self) -> None:
        """Start awake, with weights."""
        self.is_asleep = self.lacks_weights = False

    def begin(self, level: Literal[1, 2]) -> None:
        """Begin to sleep. Level 2 drops the weights."""
        self.is_asleep, self.lacks_weights = True, self.lacks_weights or level == 2

    def check(self, update: WeightUpdate | None = None) -> None:
        """Refuse an update that is impossible in this state. Without an update, refuse any request."""
        if self.is_asleep:
            raise EngineError("the engine is asleep; wake it first.")
        if self.lacks_weights and (update is None or update.adapter is not None):
            what = "it cannot serve requests" if update is None else "an adapter has no base"
            raise EngineError(
                f"the engine slept at level 2, which drops its weights, so {what}: publish all weights first, or use "
                "level 1."
            )
