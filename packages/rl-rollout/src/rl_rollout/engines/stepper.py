"""What an engine that decodes in steps is made of: sequences in the making, and the model that makes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from rl_core.data import ExpertArray, FinishReason, FloatArray, IntArray
from rl_core.weights import WeightReceipt, WeightUpdate
from rl_rollout.engines.protocol import EngineTraits, Generation, NewTokens, SamplingParams, Structure, TokenScores
from rl_rollout.engines.response_text import ResponseText


@dataclass(slots=True, eq=False, kw_only=True)
class Sample:
    """One sequence in the making; the stepper fills it.

    Attributes:
        input_ids: Prompt, or the sequence to score.
        sampling: None to score.
        seed: Of this sample.
        request_id: Of its request, where that has one.
        adapter: As `GenerateRequest.adapter`.
        top_k: Likeliest tokens to give beside each token, when it is scored.
        with_experts: Give its experts too, when it is scored.
        token_ids: Sampled so far.
        logprobs: Of token_ids; empty when greedy.
        policy_versions: Of token_ids.
        finish_reason: None while it runs.
        num_preempted: How often it was started again.
        scores: Of the input_ids, with top_k more columns, when that was asked.
        routed_experts: Of input_ids and token_ids, once it has ended; None where the stepper tells none.
        failure: Why it ended without being what was asked; the stepper's word to the engine.
        text: Where its stop strings are looked for; None without any. The stepper leaves it alone.
    """

    input_ids: list[int]
    sampling: SamplingParams | None
    seed: int | None = None
    request_id: str | None = None
    adapter: Literal["base"] | None = None
    top_k: int = 0
    with_experts: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_preempted: int = 0
    scores: TokenScores | None = None
    routed_experts: ExpertArray | None = None
    failure: str | None = None
    text: ResponseText | None = None
    _num_searched: int = 0
    _num_told: int | None = 0

    def find_stop(self) -> bool:
        """Look for a stop string in what was sampled since the last call."""
        if self.text is None:
            return False
        self.text.feed(self.token_ids[self._num_searched :])
        self._num_searched = len(self.token_ids)
        return self.text.matched_stop is not None

    def news(self, index: int) -> NewTokens | None:
        """What was sampled since the last call, of the sample of this index; None where nothing was."""
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

    def generation(self) -> Generation:
        """The finished sample as engines return it."""
        token_ids, logprobs, versions = self._arrays(0)
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=versions,
            finish_reason=self.finish_reason or "abort",
            num_preempted=self.num_preempted,
            routed_experts=self.routed_experts,
            matched_stop=None if self.text is None else self.text.matched_stop,
        )

    def _arrays(self, begin: int) -> tuple[IntArray, FloatArray, IntArray]:
        """Tokens from this one on, with their logprobs and versions."""
        token_ids = np.array(self.token_ids[begin:], dtype=np.int32)
        logprobs = np.array(self.logprobs[begin:] or np.zeros(len(token_ids)), dtype=np.float32)
        return token_ids, logprobs, np.array(self.policy_versions[begin:], dtype=np.int32)


class Stepper(Protocol):
    """A loaded model that decodes many samples at once. It is made and called by one thread, one call at a time."""

    @property
    def traits(self) -> EngineTraits:
        """What the engine is."""
        ...

    def admit(self, samples: Sequence[Sample]) -> None:
        """Take new samples, in this order."""
        ...

    def step(self) -> list[Sample]:
        """Advance every sample as far as one step goes; those now finished, with their finish_reason."""
        ...

    def remove(self, samples: Sequence[Sample]) -> None:
        """Forget samples; those that are not here are ignored."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget what was computed of earlier prompts."""
        ...

    def sleep(self, level: Literal[1, 2]) -> None:
        """Free memory, while there are no samples; called only where traits.can_sleep. Level 2 drops the weights."""
        ...

    def wake(self) -> None:
        """Take it again; after level 2 nothing is asked before an update of all weights."""
        ...

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Replace all weights, or the adapter; samples that it is for go on under the new ones.

        Raises:
            EngineError: The update is refused and nothing was touched; any other error is a failure.
        """
        ...

    def prepare(self, structure: Structure) -> None:
        """Have a structure ready; called in a thread of its own, only for kinds of traits.structures.

        Raises:
            EngineError: It cannot be followed.
        """
        ...

    def close(self) -> None:
        """Free everything."""
        ...
