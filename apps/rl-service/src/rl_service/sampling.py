"""Sampling from saved weights with one engine, which serves the weights of one client after the other."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from rl_core.data import FloatArray, IntArray
from rl_core.errors import EngineError, WeightProofError
from rl_core.weights import TokenScores
from rl_rollout.engines import GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.gateway import RefusedError, refused_field
from rl_service.requests import Sample, TextChunk

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


@dataclass(slots=True, eq=False)
class _Waiter:
    path: str
    admitted: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EngineTurns:
    """Lets requests use an engine with their own weights.

    Requests that wait for the same weights run together. Requests of others wait until those have finished; requests
    of the served weights that come later do not overtake them.
    """

    def __init__(self, serve: Callable[[str], Awaitable[int]]) -> None:
        """Start with unknown weights.

        Args:
            serve: Makes the engine serve the weights of a path, proven, and returns their version.
        """
        self._serve = serve
        self._path: str | None = None
        self._version = 0
        self._num_running = 0
        self._waiting: deque[_Waiter] = deque()
        self._switching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def using(self, path: str) -> AsyncIterator[int]:
        """Wait until the engine serves these weights; it does while the context is open. Yields their version."""
        waiter = _Waiter(path)
        self._waiting.append(waiter)
        self._advance()
        try:
            version = await waiter.admitted
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        try:
            yield version
        finally:
            self._num_running -= 1
            self._advance()

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
            self._num_running -= 1  # admitted in the turn of its cancellation
        self._advance()

    def _advance(self) -> None:
        while self._switching is None and self._waiting and self._waiting[0].path == self._path:
            waiter = self._waiting.popleft()
            if not waiter.admitted.done():
                self._num_running += 1
                waiter.admitted.set_result(self._version)
        if self._switching is None and self._waiting and not self._num_running:
            self._switching = asyncio.ensure_future(self._switch(self._waiting[0].path))

    async def _switch(self, path: str) -> None:
        self._path, failure = None, None
        try:
            self._version = await self._serve(path)
            self._path = path
        except Exception as error:
            failure = error
        self._switching = None
        mine = [one for one in self._waiting if one.path == path]
        self._waiting = deque([*(mine if failure is None else ()), *(one for one in self._waiting if one.path != path)])
        for waiter in mine:
            if failure is not None and not waiter.admitted.done():
                waiter.admitted.set_exception(failure)
        self._advance()


class Sampler:
    """Answers sampling requests."""

    def __init__(self, engine: RolloutEngine, turns: EngineTurns, *, max_samples: int) -> None:
        """Use an engine.

        Args:
            engine: The engine, started.
            turns: Whose weights it serves.
            max_samples: Maximum number of samples of a request.
        """
        self._engine, self._turns, self._max_samples = engine, turns, max_samples

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
        self, path: str, request: Sample, asked: GenerateRequest, *, request_id: str
    ) -> tuple[list[Sampled], FloatArray | None, tuple[IntArray, FloatArray] | None]:
        """Sample with the weights of a path.

        Returns:
            The samples, and logprobs and most probable tokens of the prompt, if asked for.

        Raises:
            EngineError: The engine refuses the request or failed.
            WeightProofError: Tokens were sampled with other weights.
        """
        async with self._turns.using(path) as version:
            generations = await self._engine.generate(replace(asked, request_id=request_id))
            _check_served(generations, version)
            scores = await self._scores(request, asked, generations)
        of_samples = scores[1:] or itertools.repeat(None)
        samples = [
            _sampled(generation, score, asked, top_k=request.topk_sample_logprobs)
            for generation, score in zip(generations, of_samples, strict=False)
        ]
        if not request.prompt_logprobs and not request.topk_prompt_logprobs:
            return samples, None, None
        prompt = scores[0]
        logprobs = prompt.token_logprobs.copy()
        unscored = 1 if request.prompt_logprobs_last_n is None else len(logprobs) - request.prompt_logprobs_last_n
        logprobs[: max(unscored, 1)] = np.nan
        return samples, logprobs, _top(prompt, 0, request.topk_prompt_logprobs)

    async def _scores(
        self, request: Sample, asked: GenerateRequest, generations: Sequence[Generation]
    ) -> list[TokenScores]:
        """Score the prompt, and with it the samples if needed; the engine gives greedy ones no logprobs."""
        scores_samples = _is_greedy(asked) or request.topk_sample_logprobs > 0
        top_k = max(request.topk_prompt_logprobs, request.topk_sample_logprobs)
        if not scores_samples and not request.prompt_logprobs and not top_k:
            return []
        whole = [np.concatenate([asked.input_ids, one.token_ids]) for one in generations] if scores_samples else []
        return await self._engine.score([asked.input_ids, *whole], top_k=top_k)


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
