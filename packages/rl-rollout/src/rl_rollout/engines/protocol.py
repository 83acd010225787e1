"""What every engine does: generate, score, take weights."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from typing import Annotated, Literal, Protocol

import numpy as np

from rl_core.data import ExpertArray, FinishReason, FloatArray, IntArray
from rl_core.record_fields import Axes, record, settings_record
from rl_core.weights import RoutedScores, WeightReceipt, WeightUpdate


@settings_record
class Structure:
    """What a response must be, token by token; exactly one of these.

    Attributes:
        json_schema: JSON text of a schema; `{"type": "object"}` allows any object.
        regex: Of the whole response.
        choices: Texts to choose from.
        grammar: In the Lark syntax of llguidance.
    """

    json_schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()
    grammar: str | None = None

    @property
    def kinds(self) -> list[str]:
        """Names of those that are given."""
        return [one.name for one in fields(self) if getattr(self, one.name) not in (None, ())]


@settings_record
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        max_tokens: Most new tokens of a response.
        temperature: 0 is greedy.
        top_p: Nucleus; 1 keeps every token.
        top_k: Keeps the k likeliest tokens; None keeps all.
        seed: Makes the draw repeatable; sample i of a request uses seed + i, unless each has its own parameters.
        stop_token_ids: Tokens that end a response, beside the model's own end token; the token stays in it.
        stop: Texts that end a response in which they appear; the token that completes one stays in it. They are looked
            for in the tokens' text, special tokens included, and not in the prompt.
        structure: What the response must be; logprobs are then those under this constraint, and not what `score` says.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    structure: Structure | None = None


@record
class GenerateRequest:
    """One prompt to continue.

    Attributes:
        input_ids: [P] int32.
        sampling: How to draw; several, one a sample, where the samples differ.
        num_samples: Independent responses to give.
        request_id: What `abort` knows the request by; several may share one, such as all turns of a session.
        on_tokens: Called on the event loop with tokens as they are sampled, while `generate` is awaited; see
            `rl_rollout.engines.stream`. It returns at once; what it raises fails this request alone.
        adapter: Which adapter serves it: None takes what was published last; "base" the weights without any, of the
            version of the last update of all weights, from engines with room for adapters.
    """

    input_ids: Annotated[IntArray, Axes("P")]
    sampling: SamplingParams | tuple[SamplingParams, ...]
    num_samples: int = 1
    request_id: str | None = None
    on_tokens: "Callable[[NewTokens], None] | None" = None
    adapter: Literal["base"] | None = None

    @property
    def samplings(self) -> tuple[SamplingParams, ...]:
        """How each sample is drawn, with its own seed where there is one."""
        if isinstance(self.sampling, tuple):
            return self.sampling
        seed = self.sampling.seed
        if seed is None:
            return (self.sampling,) * self.num_samples
        return tuple(replace(self.sampling, seed=seed + index) for index in range(self.num_samples))


@record
class Generation:
    """One response.

    Attributes:
        token_ids: [R] int32 sampled tokens, the end token included.
        logprobs: [R] float32, of the distribution drawn from (temperature applied); zeros when greedy.
        policy_versions: [R] int32 version of the weights that sampled each token.
        finish_reason: "stop", "length" or "abort".
        num_preempted: How often the engine had to start it again.
        routed_experts: [P + R, layers, top_k] int16 experts that each token of prompt and response used, -1 where that
            is not known, as of the last token; None from engines and models that tell none.
        matched_stop: Which of `SamplingParams.stop` ended it; of several at once the one that begins first.
    """

    token_ids: Annotated[IntArray, Axes("R")]
    logprobs: Annotated[FloatArray, Axes("R")]
    policy_versions: Annotated[IntArray, Axes("R")]
    finish_reason: FinishReason
    num_preempted: int = 0
    routed_experts: Annotated[ExpertArray | None, Axes("P + R", "layers", "top_k")] = None
    matched_stop: str | None = None


@record
class NewTokens:
    """Tokens of one sample, since those before them; all of a sample's, joined, are those of its `Generation`.

    Attributes:
        sample_index: Which sample of the request.
        token_ids: [N] int32; none only where the sample ends without more.
        logprobs: [N] float32.
        policy_versions: [N] int32.
        ended: The whole sample, with its last tokens.
    """

    sample_index: int
    token_ids: Annotated[IntArray, Axes("N")]
    logprobs: Annotated[FloatArray, Axes("N")]
    policy_versions: Annotated[IntArray, Axes("N")]
    ended: Generation | None = None


@record
class TokenScores:
    """What an engine thinks of each token of a sequence, and what it would rather have had there.

    Row t is about token t, given the tokens before it: first the token itself, then the K likeliest tokens, the
    likeliest first; the token itself is among these too where it is one of them. Nothing comes before token 0: its ids
    are -1, its logprobs 0.

    Attributes:
        token_ids: [T, K + 1] int32.
        logprobs: [T, K + 1] float32 of token_ids, at temperature 1.
    """

    token_ids: Annotated[IntArray, Axes("T", "K + 1")]
    logprobs: Annotated[FloatArray, Axes("T", "K + 1")]

    @classmethod
    def after_first(cls, token_ids: IntArray, logprobs: FloatArray) -> "TokenScores":
        """Scores of a sequence, from those of its tokens but the first.

        Args:
            token_ids: [T - 1, K + 1] integers.
            logprobs: [T - 1, K + 1] floats.
        """
        above = ((1, 0), (0, 0))
        return cls(
            token_ids=np.pad(token_ids.astype(np.int32, copy=False), above, constant_values=-1),
            logprobs=np.pad(logprobs.astype(np.float32, copy=False), above),
        )


@record
class EngineTraits:
    """What an engine is, once started.

    Attributes:
        name: Such as "vllm 0.32.0 (cpu, float32)".
        max_model_len: Most tokens of prompt and response together.
        vocab_size: Token ids are below this.
        can_sleep: Whether `sleep` frees memory here.
        max_top_k: Maximum number of top tokens that `score_top_k` returns per token.
        can_match_text: Whether it serves `SamplingParams.stop`, for which it needs the model's tokenizer.
        structures: Kinds of `Structure` that it serves, by field.
        max_lora_rank: Maximum rank of an adapter; 0 supports none.
    """

    name: str
    max_model_len: int
    vocab_size: int
    can_sleep: bool = False
    max_top_k: int = 0
    can_match_text: bool = False
    structures: tuple[str, ...] = ()
    max_lora_rank: int = 0


class RolloutEngine(Protocol):
    """An engine; all methods are called from one event loop, and may overlap.

    A request that cannot be served (too long, empty, ids out of the vocabulary) raises EngineError and
    leaves the others alone. After a failure of the engine itself every waiting call raises it.
    """

    @property
    def traits(self) -> EngineTraits:
        """What the engine is; NotReadyError before `start`."""
        ...

    async def start(self) -> None:
        """Load the model; slow. Version 0 is served until the first update."""
        ...

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """num_samples responses, in order; an aborted one has finish_reason "abort" and what it had."""
        ...

    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Logprobs of the tokens of each sequence at temperature 1, each [T] with position 0 = 0."""
        ...

    async def score_with_experts(self, sequences: Sequence[IntArray]) -> list[RoutedScores]:
        """As `score`, with the experts that the same pass used, where the model is a mixture and the engine tells."""
        ...

    async def score_top_k(self, sequences: Sequence[IntArray], *, top_k: int) -> list[TokenScores]:
        """As `score`, with the top_k likeliest tokens beside each token; 0 gives the token alone.

        Raises:
            EngineError: top_k is negative, above the vocabulary, or above `EngineTraits.max_top_k`.
        """
        ...

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Replace all weights between two decoding steps, and drop what was cached from the old ones."""
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests, paused or not; their `generate` calls return what there is, with reason "abort"."""
        ...

    async def abort_all(self) -> None:
        """End every request, as `abort`."""
        ...

    async def pause(self) -> None:
        """Stop between two decoding steps: nothing is drawn or scored until `resume`, and requests wait.

        The weights may be replaced meanwhile; the same sequences then go on under the new ones.
        """
        ...

    async def resume(self) -> None:
        """Go on where `pause` stopped."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget what was computed of earlier prompts; running requests go on."""
        ...

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Free the memory of weights and KV cache until `wake`; requests made meanwhile are refused.

        Args:
            level: 1 keeps the weights on the host; 2 drops them, and requests are refused until an update of all
                weights has come after `wake`.

        Raises:
            EngineError: The platform cannot (see `EngineTraits.can_sleep`), or requests are running.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again, with the weights of before where they were kept. Does nothing when awake."""
        ...

    async def close(self) -> None:
        """Free everything; no process stays behind. Can be called twice."""
        ...
