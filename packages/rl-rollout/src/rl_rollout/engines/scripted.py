"""A scripted engine without a model, for tests."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from rl_core.data import FloatArray, ImageSpan, IntArray
from rl_core.errors import EngineError, NotReadyError
from rl_core.weights import InProcess, TokenScores, WeightReceipt, WeightUpdate, tensor_checksum
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation
from rl_rollout.engines.requests import check_request, check_scoring, missing_adapter
from rl_rollout.engines.response_text import Decode, ResponseText
from rl_rollout.engines.stepper import Sample, SleepState

Script = (
    Mapping[tuple[int, ...], Sequence[Sequence[int]]]
    | Callable[[GenerateRequest, int], Sequence[int] | Awaitable[Sequence[int]]]
)
"""Responses by prompt (sample i gets entry i, modulo their number), or a function of request and sample index.

The function may raise, which fails the request, or wait, which orders the responses.
"""

DEFAULT_TRAITS = EngineTraits(name="scripted", max_model_len=1 << 20, vocab_size=1 << 20, max_top_k=1 << 20)


class ScriptedEngine:
    """A `RolloutEngine` that follows a script.

    A response longer than max_tokens is cut. Logprobs are -1, or 0 when greedy.

    Attributes:
        requests: All accepted requests, in order.
        updates: All accepted weight updates, in order.
    """

    def __init__(
        self,
        script: Script,
        *,
        end_token_ids: Sequence[int] = (),
        traits: EngineTraits = DEFAULT_TRAITS,
        score: Callable[[IntArray], FloatArray] | None = None,
        receive: Callable[[WeightUpdate], WeightReceipt] | None = None,
        decode: Decode | None = None,
        pace: Callable[[GenerateRequest, int, int], Awaitable[None]] | None = None,
    ) -> None:
        """Store the script.

        Args:
            script: The responses.
            end_token_ids: A response that ends with one of these has finish_reason "stop", any other "length".
            traits: The engine's traits.
            score: Returns a sequence's logprobs. By default -1 everywhere except at position 0.
            receive: Returns the receipt of a weight update. By default, the correct one.
            decode: Decodes token ids, for stop strings. Without it, stop strings are refused.
            pace: Awaited before each token with the request, the sample index and the token's position.
        """
        self.requests: list[GenerateRequest] = []
        self.updates: list[WeightUpdate] = []
        self._script = script
        self._end_token_ids = frozenset(end_token_ids)
        self._traits = replace(traits, can_match_text=traits.can_match_text or decode is not None)
        self._decode = decode
        self._pace = pace
        self._score = score or _flat_scores
        self._receive = receive or honest_receipt
        self._version = 0
        self._waiting: dict[asyncio.Future[None], str | None] = {}
        self._sleep_state = SleepState()
        self._is_started = False
        self._is_closed = False

    @property
    def traits(self) -> EngineTraits:
        """See `RolloutEngine.traits`."""
        if not self._is_started or self._is_closed:
            raise NotReadyError(f"the engine {'is closed' if self._is_closed else 'has not been started'}.")
        return self._traits

    async def start(self) -> None:
        """See `RolloutEngine.start`."""
        self._is_started = True

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        check_request(request, self.traits)
        self._sleep_state.check()
        self.requests.append(request)
        return list(await asyncio.gather(*(self._respond(request, index) for index in range(request.num_samples))))

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        top_k: int = 0,
        with_experts: bool = False,  # noqa: ARG002 - the protocol's argument
        images: Sequence[tuple[ImageSpan, ...]] = (),
        adapter: str | None = None,
    ) -> list[TokenScores]:
        """See `RolloutEngine.score`. Other tokens share the rest of the mass evenly. It reports no experts."""
        check_scoring(sequences, top_k, self.traits, images, adapter)
        self._sleep_state.check()
        return [_spread(sequence, self._score(sequence), top_k, self._traits.vocab_size) for sequence in sequences]

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `RolloutEngine.update_weights`."""
        self.traits  # noqa: B018 - raises unless started
        self._sleep_state.check(update)
        receipt = self._receive(update)
        self._sleep_state.lacks_weights = False
        self.updates.append(update)
        self._version = update.version
        return receipt

    async def drop_adapter(self, name: str) -> None:
        """See `RolloutEngine.drop_adapter`. It serves none."""
        raise missing_adapter(name, ())

    async def abort(self, request_ids: Collection[str] | None) -> None:
        """See `RolloutEngine.abort`. A waiting script is cancelled."""
        for future, request_id in list(self._waiting.items()):
            if request_ids is None or request_id in request_ids:
                future.cancel()

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """See `RolloutEngine.sleep`."""
        if not self.traits.can_sleep or self._waiting:
            raise EngineError(f"{self.traits.name} cannot sleep, or has {len(self._waiting)} samples running.")
        self._sleep_state.begin(level)

    async def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        self._sleep_state.is_asleep = False

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._is_closed = True
        await self.abort(None)

    async def _respond(self, request: GenerateRequest, index: int) -> Generation:
        sampling = request.samplings[index]
        sample = Sample(input_ids=request.input_ids.tolist(), sampling=sampling)
        if self._decode is not None and sampling.stop:
            sample.text = ResponseText(self._decode, sample.input_ids, stop=sampling.stop)
        said = self._said(request, index)
        saying = self._say(said, request, index, sample)
        if not isinstance(said, Awaitable) and self._pace is None:
            await saying  # synchronously
        elif not await self._finished(saying, request):
            sample.finish_reason = "abort"
        _tell(request, index, sample)
        return sample.generation()

    async def _finished(self, saying: Coroutine[None, None, None], request: GenerateRequest) -> bool:
        """Wait for a script. Return False if it was aborted."""
        future = asyncio.ensure_future(saying)
        self._waiting[future] = request.request_id
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.cancelled():  # the caller was cancelled, not the script
                future.cancel()
                raise
            if self._is_closed:
                raise EngineError("the engine was closed.") from None
            return False
        finally:
            del self._waiting[future]
        return True

    async def _say(
        self, said: Sequence[int] | Awaitable[Sequence[int]], request: GenerateRequest, index: int, sample: Sample
    ) -> None:
        sampling = request.samplings[index]
        tokens = await said if isinstance(said, Awaitable) else said
        for position, token in enumerate(tokens[: sampling.max_tokens]):
            if self._pace is not None:
                await self._pace(request, index, position)
            sample.token_ids.append(int(token))
            sample.logprobs.append(-1.0 if sampling.temperature else 0.0)
            sample.policy_versions.append(self._version)
            if sample.find_stop():
                break
            _tell(request, index, sample)
        stops = self._end_token_ids | set(sampling.stop_token_ids)
        ends = sample.find_stop() or (sample.token_ids and sample.token_ids[-1] in stops)
        sample.finish_reason = "stop" if ends else "length"

    def _said(self, request: GenerateRequest, index: int) -> Sequence[int] | Awaitable[Sequence[int]]:
        if not isinstance(self._script, Mapping):
            return self._script(request, index)
        prompt = tuple(request.input_ids.tolist())
        if prompt not in self._script:
            raise EngineError(f"the script has no response to the prompt {list(prompt)}.")
        responses = self._script[prompt]
        return responses[index % len(responses)]


def _tell(request: GenerateRequest, index: int, sample: Sample) -> None:
    if request.on_tokens is not None and (news := sample.news(index)) is not None:
        request.on_tokens(news)


def honest_receipt(update: WeightUpdate) -> WeightReceipt:
    """Return the receipt of an engine that received everything as sent."""
    live = {name: digest.probe for name, digest in update.served.items()}
    live.update({name: live[source] for name, source in update.tied.items()})
    tensors = update.location.tensors if isinstance(update.location, InProcess) else {}
    arrived = {
        name: tensor_checksum(tensors[name], digest.kind) if name in tensors else digest.checksum
        for name, digest in update.digests.items()
    }
    return WeightReceipt(version=update.version, arrived=arrived, live=live)


def _flat_scores(sequence: IntArray) -> FloatArray:
    scores = np.full(len(sequence), -1.0, dtype=np.float32)
    scores[0] = 0.0
    return scores


def _spread(sequence: IntArray, scores: FloatArray, top_k: int, vocab_size: int) -> TokenScores:
    """Give each token its score, and spread the rest evenly over the other tokens, lowest ids first."""
    ids = np.empty((len(sequence) - 1, top_k + 1), dtype=np.int32)
    logprobs = np.empty(ids.shape, dtype=np.float32)
    for row, (token, score) in enumerate(zip(sequence[1:].tolist(), scores[1:].tolist(), strict=True)):
        rest = float(np.log(max(-np.expm1(score), 1e-30) / max(vocab_size - 1, 1)))
        others = [other for other in range(min(top_k + 1, vocab_size)) if other != token]
        ranked = [token, *others] if score >= rest else [*others, token]
        ids[row] = [token, *ranked[:top_k]]
        logprobs[row] = np.where(ids[row] == token, score, rest)
    return TokenScores.after_first(ids, logprobs)
