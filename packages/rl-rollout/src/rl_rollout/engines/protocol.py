"""The protocol of engines: generate, score and update weights."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from typing import Annotated, Literal, Protocol

from rl_core.data import ExpertArray, FinishReason, FloatArray, ImageSpan, IntArray
from rl_core.record_fields import Axes, record, settings_record
from rl_core.weights import TokenScores, WeightReceipt, WeightUpdate

BASE = "base"
"""Name with which requests choose the weights without an adapter."""


@settings_record
class Structure:
    """A constraint on a response, enforced token by token. Set exactly one field.

    Attributes:
        json_schema: A JSON schema as text. `{"type": "object"}` allows any object.
        regex: Pattern of the whole response.
        choices: Allowed responses.
        grammar: A grammar in llguidance's Lark syntax.
    """

    json_schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()
    grammar: str | None = None

    @property
    def kinds(self) -> list[str]:
        """Names of the fields that are set."""
        return [one.name for one in fields(self) if getattr(self, one.name) not in (None, ())]


@settings_record
class SamplingParams:
    """Sampling parameters.

    Attributes:
        max_tokens: Maximum number of new tokens in a response.
        temperature: 0 means greedy.
        top_p: Nucleus sampling; 1 keeps every token.
        top_k: Keep the k most likely tokens. None keeps all.
        seed: Seed for repeatable samples. Sample i of a request uses seed + i, unless each sample has its own
            parameters.
        stop_token_ids: Tokens that end a response, in addition to the model's end token. The response includes the
            token.
        stop: Strings that end a response. The response includes the token that completes one. They are matched in the
            response's text, including special tokens, but not in the prompt.
        structure: Constraint on the response. Logprobs are those under the constraint, and differ from those of
            `score`.
        max_nucleus: Return the tokens that top_k and top_p kept at each position, so that a learner can score the same
            distribution. A sample for which they kept more than this many fails. None does not return them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    structure: Structure | None = None
    max_nucleus: int | None = None


@record
class GenerateRequest:
    """A request to continue one prompt.

    Attributes:
        input_ids: [P] int32.
        sampling: Sampling parameters for all samples, or one entry per sample.
        num_samples: Number of independent responses.
        request_id: Id for `abort`. Several requests may share one, such as all turns of a session.
        on_tokens: Called on the event loop with new tokens while `generate` is awaited; see
            `rl_rollout.engines.stream`. It must return at once. An exception fails only this request.
        adapter: Adapter to use, by the name of its update. None selects the one published without a name, or all
            weights if they were published later. "base" selects the weights without an adapter, at the version of the
            last full update, on engines started with adapter support.
        images: Images among input_ids, in their order. The engine reads them from its store, by digest.
    """

    input_ids: Annotated[IntArray, Axes("P")]
    sampling: SamplingParams | tuple[SamplingParams, ...]
    num_samples: int = 1
    request_id: str | None = None
    on_tokens: "Callable[[NewTokens], None] | None" = None
    adapter: str | None = None
    images: tuple[ImageSpan, ...] = ()

    @property
    def samplings(self) -> tuple[SamplingParams, ...]:
        """Return the sampling parameters of each sample, with its own seed if there is one."""
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
        token_ids: [R] int32 sampled tokens, including the end token.
        logprobs: [R] float32 under the sampling distribution (temperature applied); zeros if greedy.
        policy_versions: [R] int32 version of the weights that sampled each token.
        finish_reason: "stop", "length" or "abort".
        num_preempted: How often the engine restarted it.
        routed_experts: [P + R, layers, top_k] int16 experts used by each token of prompt and response. -1 if unknown,
            as for the last token. None if the engine or model does not report experts.
        nucleus_ids: [R, max_nucleus] int32 tokens that top_k and top_p kept at each position, most likely first, then
            -1. None unless requested, and if greedy.
        matched_stop: The entry of `SamplingParams.stop` that ended it. If several match at once, the one that begins
            first.
        pixel_digest: Digest of the pixel values that the engine used for the request's images
            (`rl_core.images.pixel_digest`, joined in their order); empty without images.
    """

    token_ids: Annotated[IntArray, Axes("R")]
    logprobs: Annotated[FloatArray, Axes("R")]
    policy_versions: Annotated[IntArray, Axes("R")]
    finish_reason: FinishReason
    num_preempted: int = 0
    routed_experts: Annotated[ExpertArray | None, Axes("P + R", "layers", "top_k")] = None
    nucleus_ids: Annotated[IntArray | None, Axes("R", "max_nucleus")] = None
    matched_stop: str | None = None
    pixel_digest: str = ""


@record
class NewTokens:
    """New tokens of one sample. The pieces of a sample, joined, are the tokens of its `Generation`.

    Attributes:
        sample_index: Index of the sample in the request.
        token_ids: [N] int32. Empty only if the sample ends without further tokens.
        logprobs: [N] float32.
        policy_versions: [N] int32.
        ended: The whole sample, set with its last tokens.
    """

    sample_index: int
    token_ids: Annotated[IntArray, Axes("N")]
    logprobs: Annotated[FloatArray, Axes("N")]
    policy_versions: Annotated[IntArray, Axes("N")]
    ended: Generation | None = None


@record
class EngineTraits:
    """Properties of a started engine.

    Attributes:
        name: Name and version, such as "vllm 0.32.0 (cpu, float32)".
        max_model_len: Maximum number of tokens of prompt and response together.
        vocab_size: All token ids are smaller than this.
        can_sleep: Whether `sleep` frees memory on this platform.
        max_top_k: Maximum number of top tokens that `score` returns per token.
        can_match_text: Whether it supports `SamplingParams.stop`, which needs the model's tokenizer.
        structures: Supported kinds of `Structure`, by field name.
        max_lora_rank: Maximum rank of an adapter; 0 supports none.
        max_adapters: Maximum number of adapters served at once, if there may be any.
        max_images: Maximum number of images in a sequence; 0 supports none.
    """

    name: str
    max_model_len: int
    vocab_size: int
    can_sleep: bool = False
    max_top_k: int = 0
    can_match_text: bool = False
    structures: tuple[str, ...] = ()
    max_lora_rank: int = 0
    max_adapters: int = 1
    max_images: int = 0


class RolloutEngine(Protocol):
    """An engine. All methods are called from one event loop, and calls may overlap.

    An engine may also have `async def gpu_use(self) -> list[GpuUse]` (`rl_core.gpus`), the use of each of its GPUs
    since the last call.

    A request that cannot be served (too long, empty, token ids outside the vocabulary) raises EngineError and does not
    affect other requests. After a failure of the engine itself, every waiting call raises that error.
    """

    @property
    def traits(self) -> EngineTraits:
        """Properties of the engine. Raises NotReadyError before `start`."""

    async def start(self) -> None:
        """Load the model, which is slow. The engine serves version 0 until the first update."""

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """Return num_samples responses, in order. An aborted one has finish_reason "abort" and its tokens so far."""

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        top_k: int = 0,
        with_experts: bool = False,
        images: Sequence[tuple[ImageSpan, ...]] = (),
        adapter: str | None = None,
    ) -> list[TokenScores]:
        """Return the logprobs of each sequence's tokens at temperature 1.

        Args:
            sequences: Token ids, [T] each.
            top_k: Number of most likely tokens to add at each position.
            with_experts: Add the experts of the same pass, if the model is a mixture and the engine reports them.
            images: Images of each sequence; empty if none has any.
            adapter: See `GenerateRequest.adapter`.

        Raises:
            EngineError: top_k is negative, above the vocabulary, or above `EngineTraits.max_top_k`; the adapter is not
                served; or an image cannot be used.
        """

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Replace all weights, or one adapter, between two decoding steps, and drop caches computed with the old ones.

        Running requests of what was replaced continue under the new weights. All weights replace every adapter too.
        """

    async def drop_adapter(self, name: str) -> None:
        """Free an adapter's slot. Its running requests fail.

        Raises:
            EngineError: The engine serves no adapter of this name.
        """

    async def abort(self, request_ids: Collection[str] | None) -> None:
        """End these requests, or all (None). Their `generate` calls return the tokens so far, with reason "abort"."""

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Free the memory of weights and KV cache until `wake`. Requests made meanwhile are refused.

        Args:
            level: 1 keeps the weights in host memory. 2 drops them, and requests are refused until an update of all
                weights after `wake`.

        Raises:
            EngineError: The platform does not support it (see `EngineTraits.can_sleep`), or requests are running.
        """

    async def wake(self) -> None:
        """Allocate the memory again, and restore the weights if they were kept. Does nothing when awake."""

    async def close(self) -> None:
        """Free all resources and end all processes. Safe to call twice."""
