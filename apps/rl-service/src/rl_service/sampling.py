"""Sampling from saved weights with one engine, which has slots for the weights of several clients."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, cast

import numpy as np

from rl_core.data import FloatArray, IntArray
from rl_core.errors import EngineError, WeightProofError
from rl_core.weights import TokenScores
from rl_rollout.engines import GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.gateway import RefusedError, refused_field
from rl_service.backend import BASE
from rl_service.requests import Sample, TextChunk

NO_LOGPROB = -99999.0
"""What the client reads as no token among the most probable ones, with the id 0."""
MAX_SEED = 1 << 52
"""Below the largest seed of every engine; larger ones are used modulo this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A sampled sequence.

    Attributes:
        tokens: [R] int32.
        logprobs: [R] float32.
        is_cut: Whether the maximum number of tokens ended it.
        top: Most probable tokens and their logprobs, [R, K] each; None if nobody asked.
    """

    tokens: IntArray
    logprobs: FloatArray
    is_cut: bool
    top: tuple[IntArray, FloatArray] | None = None


class Weights(NamedTuple):
    """Weights to sample from.

    Attributes:
        path: Where they are saved, or `BASE`.
        saved_at: Unix time; others may be saved at the same path later.
    """

    path: str
    saved_at: float = 0.0


class Served(NamedTuple):
    """What a request asks the engine for.

    Attributes:
        adapter: See `GenerateRequest.adapter`.
        version: Version of all tokens that it gets.
    """

    adapter: str | None
    version: int


@dataclass(slots=True, eq=False)
class _Slot:
    """Room in the engine for the weights of one adapter, or for all weights."""

    adapter: str | None
    weights: Weights | None = None
    loading: "asyncio.Future[int] | None" = None
    num_users: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.num_users and (self.loading is None or self.loading.done())


@dataclass(slots=True, eq=False)
class _Waiter:
    weights: Weights
    slot: _Slot | None = None
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class EngineSlots:
    """Lets requests use an engine with their own weights.

    Requests whose weights are in a slot run at once. Others get a slot that no request uses, an empty one or the least
    recently used, in their order. While one waits, the least recently used slot accepts no requests, so that it becomes
    free.
    """

    def __init__(self, serve: Callable[[Weights, str | None], Awaitable[int]], adapters: Sequence[str | None]) -> None:
        """Start with empty slots.

        Args:
            serve: Makes the engine serve weights under an adapter's name, proven, and returns their version.
            adapters: Name of each slot; [None] is a slot for all weights, which the base needs too.
        """
        self._serve = serve
        self._slots = [_Slot(adapter) for adapter in adapters]  # least recently used first
        self._waiting: list[_Waiter] = []

    @asynccontextmanager
    async def using(self, weights: Weights) -> AsyncIterator[Served]:
        """Wait until the engine serves these weights; it does while the context is open.

        Raises:
            RLError: They cannot be served.
        """
        if weights.path == BASE and self._slots[0].adapter is not None:
            yield Served(BASE, 0)
            return
        waiter = _Waiter(weights)
        self._waiting.append(waiter)
        self._advance()
        try:
            await waiter.admitted.wait()
            slot = cast("_Slot", waiter.slot)
            yield Served(slot.adapter, await asyncio.shield(cast("asyncio.Future[int]", slot.loading)))
        finally:
            if waiter.slot is None:
                self._waiting.remove(waiter)
            else:
                waiter.slot.num_users -= 1
            self._advance()

    def _advance(self) -> None:
        """Admit requests that have a slot, in their order."""
        claimed = None
        for waiter in list(self._waiting):
            slot = self._slot_for(waiter.weights)
            if slot is None:
                claimed = claimed or self._slots[0]
            elif slot is not claimed:
                self._slots.remove(slot)
                self._slots.append(slot)
                self._waiting.remove(waiter)
                slot.num_users += 1
                waiter.slot = slot
                waiter.admitted.set()

    def _slot_for(self, weights: Weights) -> _Slot | None:
        """Return the slot that has these weights, or one that begins to load them; None if all others are in use."""
        having = [slot for slot in self._slots if slot.weights == weights]
        idle = sorted((slot for slot in self._slots if slot.is_idle), key=lambda one: one.weights is not None)
        if having or not idle:
            return having[0] if having else None
        slot = idle[0]
        slot.weights, slot.loading = weights, asyncio.ensure_future(self._serve(weights, slot.adapter))
        slot.loading.add_done_callback(partial(self._loaded, slot))
        return slot

    def _loaded(self, slot: _Slot, loading: "asyncio.Future[int]") -> None:
        if loading.cancelled() or loading.exception() is not None:
            slot.weights = None
        self._advance()


class Share:
    """Bounds the samples of a session in the engine, so that its waiting ones do not delay those of other sessions."""

    def __init__(self, most: int) -> None:
        """Allow this many samples at once; a request of more counts as this many."""
        self._most, self._room, self._first = most, asyncio.Semaphore(most), asyncio.Lock()

    @asynccontextmanager
    async def of(self, num_samples: int) -> AsyncIterator[None]:
        """Wait until samples have room; they do while the context is open."""
        taken = 0
        try:
            async with self._first:
                while taken < min(num_samples, self._most):
                    await self._room.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._room.release()


class Sampler:
    """Answers sampling requests."""

    def __init__(self, engine: RolloutEngine, slots: EngineSlots, *, max_samples: int) -> None:
        """Use an engine.

        Args:
            engine: The engine, started.
            slots: The weights that it serves.
            max_samples: Maximum number of samples of a request.
        """
        self._engine, self._slots, self._max_samples = engine, slots, max_samples

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of prompt and sample together."""
        return self._engine.traits.max_model_len

    def checked(self, request: Sample) -> GenerateRequest:
        """Return a request to the engine.

        Raises:
            RefusedError: The request cannot be served; the message names the field.
        """
        traits = self._engine.traits
        ids: list[int] = []
        for index, chunk in enumerate(request.prompt.chunks):
            if not isinstance(chunk, TextChunk):
                raise refused_field(f"prompt.chunks[{index}]", chunk.type, "text; this service samples no other kind")
            ids += chunk.tokens
        if not ids or not 0 <= min(ids) <= max(ids) < traits.vocab_size:
            raise RefusedError(f"prompt must have token ids from 0 to {traits.vocab_size - 1}.", param="prompt")
        if not 1 <= request.num_samples <= self._max_samples:
            raise refused_field(
                "num_samples", request.num_samples, f"from 1 to limits.max_samples = {self._max_samples}"
            )
        for name in ("target_prompt_logprobs", "record_stability_info", "prompt_alt_tokens_k"):
            if getattr(request, name):
                raise RefusedError(f"{name} is not supported by this service. Omit it.", param=name)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= getattr(request, name) <= traits.max_top_k:
                raise refused_field(
                    name, getattr(request, name), f"from 0 to the engine's max_top_k = {traits.max_top_k}"
                )
        room = traits.max_model_len - len(ids)
        most = request.sampling_params.max_tokens
        if most is None:
            most = room
        if room < 1 or not 1 <= most <= room:
            raise RefusedError(
                f"prompt and max_tokens can be at most {traits.max_model_len} tokens together, and max_tokens "
                f"at least 1; found a prompt of {len(ids)} and max_tokens = {request.sampling_params.max_tokens}.",
                param="max_tokens",
            )
        sampling = self._sampling(request, most)
        return GenerateRequest(input_ids=np.asarray(ids, np.int32), sampling=sampling, num_samples=request.num_samples)

    def _sampling(self, request: Sample, max_tokens: int) -> SamplingParams:
        given = request.sampling_params
        stop = [given.stop] if isinstance(given.stop, str) else given.stop
        if stop is not None and not stop:
            raise RefusedError("stop = [] turns off the end token, which this engine cannot. Omit stop.", param="stop")
        texts = tuple(one for one in stop or () if isinstance(one, str))
        ids = tuple(one for one in stop or () if isinstance(one, int))
        if texts and not self._engine.traits.can_match_text:
            raise RefusedError("this engine does not support stop strings. Use token ids.", param="stop")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=None if given.top_k == -1 else given.top_k,
            seed=None if given.seed is None else given.seed % MAX_SEED,
            stop=texts,
            stop_token_ids=ids,
        )

    async def sample(
        self, weights: Weights, request: Sample, asked: GenerateRequest, *, request_id: str
    ) -> tuple[list[Sampled], FloatArray | None, tuple[IntArray, FloatArray] | None]:
        """Sample with some weights.

        Returns:
            The samples, and logprobs and most probable tokens of the prompt, if asked for.

        Raises:
            EngineError: The engine refuses the request or failed.
            WeightProofError: The engine cannot serve these weights, or sampled tokens with others.
        """
        async with self._slots.using(weights) as served:
            asked = replace(asked, request_id=request_id, adapter=served.adapter)
            generations = await self._engine.generate(asked)
            _check_served(generations, served.version)
            scores = await self._scores(request, asked, generations)
        of_samples = scores[1:] or itertools.repeat(None)
        samples = [
            _sampled(generation, score, asked, top_k=request.topk_sample_logprobs)
            for generation, score in zip(generations, of_samples, strict=False)
        ]
        if not request.prompt_logprobs and not request.topk_prompt_logprobs:
            return samples, None, None
        prompt = scores[0]
        logprobs, top = prompt.token_logprobs.copy(), _top(prompt, 0, request.topk_prompt_logprobs)
        last = request.prompt_logprobs_last_n
        num_unscored = max(1, 0 if last is None else len(logprobs) - last)
        logprobs[:num_unscored] = np.nan
        if top is not None:
            top = top[0].copy(), top[1].copy()
            top[0][:num_unscored], top[1][:num_unscored] = 0, NO_LOGPROB
        return samples, logprobs, top

    async def _scores(
        self, request: Sample, asked: GenerateRequest, generations: Sequence[Generation]
    ) -> list[TokenScores]:
        """Score the prompt, and with it the samples if needed; the engine gives greedy ones no logprobs."""
        scores_samples = _is_greedy(asked) or request.topk_sample_logprobs > 0
        top_k = max(request.topk_prompt_logprobs, request.topk_sample_logprobs)
        if not scores_samples and not request.prompt_logprobs and not top_k:
            return []
        whole = [np.concatenate([asked.input_ids, one.token_ids]) for one in generations] if scores_samples else []
        return await self._engine.score([asked.input_ids, *whole], top_k=top_k, adapter=asked.adapter)


def _check_served(generations: Sequence[Generation], version: int) -> None:
    for generation in generations:
        if generation.finish_reason == "abort":
            raise EngineError("the request was aborted before its end.")
        if (generation.policy_versions != version).any():
            raise WeightProofError(
                f"tokens of version {int(generation.policy_versions.max())} were sampled for a client of version "
                f"{version}; they are dropped."
            )


def _is_greedy(asked: GenerateRequest) -> bool:
    return asked.samplings[0].temperature == 0


def _sampled(generation: Generation, scores: TokenScores | None, asked: GenerateRequest, *, top_k: int) -> Sampled:
    num_prompt = len(asked.input_ids)
    return Sampled(
        tokens=generation.token_ids,
        logprobs=scores.token_logprobs[num_prompt:]
        if scores is not None and _is_greedy(asked)
        else generation.logprobs,
        is_cut=generation.finish_reason == "length",
        top=None if scores is None else _top(scores, num_prompt, top_k),
    )


def _top(scores: TokenScores, first: int, top_k: int) -> tuple[IntArray, FloatArray] | None:
    return (scores.token_ids[first:, 1 : top_k + 1], scores.logprobs[first:, 1 : top_k + 1]) if top_k else None
