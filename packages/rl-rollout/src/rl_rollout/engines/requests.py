"""Checks whether an engine can serve a request, in the same way for every engine."""

import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from rl_core.data import ImageSpan, IntArray
from rl_core.errors import EngineError
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, SamplingParams, Structure

LOWEST_TEMPERATURE = 0.01
"""Minimum positive temperature. Below it, probabilities become 0 or 1 and logprobs lose their meaning."""
HIGHEST_TEMPERATURE = 2.0
"""vLLM's maximum."""
MAX_STOPS = 64
"""Maximum number of stop strings per request. Each is matched after every token."""
MAX_TEXT = 1 << 16
"""Maximum characters of all stop strings together, and of a structure."""


def check_request(request: GenerateRequest, traits: EngineTraits) -> None:
    """Refuse a request that cannot be served as specified.

    Raises:
        EngineError: The request is invalid. The message names what was expected, what was found and the fix.
    """
    if request.num_samples < 1:
        raise EngineError(f"num_samples must be at least 1; found {request.num_samples}.")
    samplings = request.samplings
    if len(samplings) != request.num_samples:
        raise EngineError(
            f"sampling must be one SamplingParams, or one for each of the {request.num_samples} samples; found "
            f"{len(samplings)}."
        )
    for sampling in set(samplings):
        _check_sampling(sampling, traits)
    _check_token_ids(request.input_ids, traits, what="input_ids")
    _check_images(request.images, traits)
    check_chosen_adapter(request.adapter, traits)
    longest = max(sampling.max_tokens for sampling in samplings)
    if len(request.input_ids) + longest > traits.max_model_len:
        raise EngineError(
            f"prompt and response together must be at most max_model_len = {traits.max_model_len} tokens; found a "
            f"prompt of {len(request.input_ids)} and max_tokens = {longest}. Drop long prompts, lower max_tokens, or "
            "start the engine with a larger max_model_len."
        )


def check_scoring(
    sequences: Sequence[IntArray],
    top_k: int,
    traits: EngineTraits,
    images: Sequence[tuple[ImageSpan, ...]] = (),
    adapter: str | None = None,
) -> None:
    """Refuse sequences that cannot be scored, or an invalid number of top tokens.

    Raises:
        EngineError: A sequence is empty, too long, or has token ids outside the vocabulary; top_k is invalid; or there
            are images or an adapter that the engine does not accept.
    """
    check_chosen_adapter(adapter, traits)
    if images and len(images) != len(sequences):
        raise EngineError(
            f"images must be those of each sequence, or none; found {len(images)} for {len(sequences)} sequences."
        )
    for spans in images:
        _check_images(spans, traits)
    if top_k < 0:
        raise EngineError(
            f"top_k must be at least 0 (0 returns only the logprobs of the tokens themselves); found {top_k}."
        )
    if top_k > traits.vocab_size:
        raise EngineError(f"top_k must be at most the model's vocabulary of {traits.vocab_size} tokens; found {top_k}.")
    if top_k > traits.max_top_k:
        raise EngineError(
            f"top_k must be at most the engine's max_top_k = {traits.max_top_k}; found {top_k}. Lower top_k, or start "
            f"the engine with max_top_k = {top_k} (VLLMOptions.max_top_k)."
        )
    for sequence in sequences:
        _check_token_ids(sequence, traits, what="sequence")
        if len(sequence) > traits.max_model_len:
            raise EngineError(
                f"a sequence must be at most max_model_len = {traits.max_model_len} tokens to be scored; found "
                f"{len(sequence)}. Start the engine with a larger max_model_len."
            )


def aborted_generations(request: GenerateRequest) -> list[Generation]:
    """Return the empty results of a request that was aborted before its first token."""
    nothing = np.zeros(0, dtype=np.int32)
    logprobs = nothing.astype(np.float32)
    aborted = Generation(token_ids=nothing, logprobs=logprobs, policy_versions=nothing, finish_reason="abort")
    return [aborted] * request.num_samples


def only_given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments of `score` that are not empty, because an engine may not know the others."""
    return {name: value for name, value in arguments.items() if value}


def _check_token_ids(token_ids: IntArray, traits: EngineTraits, *, what: str) -> None:
    """Check that token ids are a [T] array of ids in the vocabulary, T >= 1."""
    if token_ids.ndim != 1 or not len(token_ids) or token_ids.dtype.kind not in "iu":
        raise EngineError(
            f"{what} must be a [T] integer array with T >= 1; found shape {list(token_ids.shape)} of "
            f"{token_ids.dtype}. Add at least one token to an empty prompt."
        )
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= traits.vocab_size:
        raise EngineError(
            f"{what} must contain token ids from 0 to {traits.vocab_size - 1}; found {low if low < 0 else high}. "
            "Check that the tokenizer belongs to this model."
        )


def _check_images(images: Sequence[ImageSpan], traits: EngineTraits) -> None:
    if not images or len(images) <= traits.max_images:
        return
    if not traits.max_images:
        raise EngineError(
            f"{traits.name} accepts no images. Start it with image_folder, the folder of an ImageStore, and a model "
            "that takes images."
        )
    raise EngineError(
        f"a sequence must have at most {traits.max_images} images; found {len(images)}. Drop prompts with more."
    )


def check_chosen_adapter(adapter: str | None, traits: EngineTraits) -> None:
    """Refuse to choose an adapter in an engine without adapter support, whose weights may contain one.

    Raises:
        EngineError: The engine has no adapter support.
    """
    if adapter is not None and not traits.max_lora_rank:
        raise EngineError(
            f"adapter = {json.dumps(adapter)} needs an engine that keeps the adapter separate from its weights, which "
            f"{traits.name} does not. Start it with max_lora_rank, or leave out adapter."
        )


def missing_adapter(name: str, served: Collection[str]) -> EngineError:
    """Return the error of a request for an adapter that the engine does not serve."""
    return EngineError(
        f"the engine serves no adapter {name!r}, only {', '.join(map(repr, sorted(served))) or 'the base'}. Publish it "
        "first."
    )


def _check_sampling(sampling: SamplingParams, traits: EngineTraits) -> None:
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1; found {sampling.max_tokens}.")
    if sampling.temperature != 0 and not LOWEST_TEMPERATURE <= sampling.temperature <= HIGHEST_TEMPERATURE:
        raise EngineError(
            f"temperature must be 0 (greedy) or from {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}; found "
            f"{sampling.temperature}."
        )
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"top_p must be in (0, 1]; found {sampling.top_p}.")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise EngineError(f"top_k must be at least 1, or None to keep every token; found {sampling.top_k}.")
    if sampling.max_nucleus is not None and sampling.max_nucleus < 1:
        raise EngineError(
            f"max_nucleus must be at least 1, or None to return no kept tokens; found {sampling.max_nucleus}."
        )
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < traits.vocab_size]
    if outside:
        raise EngineError(f"stop_token_ids must be from 0 to {traits.vocab_size - 1}; found {outside[0]}.")
    if sampling.stop:
        _check_stop(sampling.stop, traits)
    if sampling.structure is not None:
        _check_structure(sampling.structure, traits)


def _check_stop(stop: tuple[str, ...], traits: EngineTraits) -> None:
    if not traits.can_match_text:
        raise EngineError(
            f"stop strings need a tokenizer, and {traits.name} has none. Put the tokenizer's files into the model "
            "folder, or use stop_token_ids."
        )
    if "" in stop:
        raise EngineError("a stop string must not be empty: it would end every response immediately. Remove it.")
    length = sum(map(len, stop))
    if len(stop) > MAX_STOPS or length > MAX_TEXT:
        raise EngineError(
            f"stop must be at most {MAX_STOPS} strings of {MAX_TEXT:,} characters together; found {len(stop)} of "
            f"{length:,}."
        )


def _check_structure(structure: Structure, traits: EngineTraits) -> None:
    kinds = structure.kinds
    if len(kinds) != 1:
        raise EngineError(f"a Structure must have exactly one kind; found {', '.join(kinds) or 'none'}.")
    if kinds[0] not in traits.structures:
        raise EngineError(
            f"{traits.name} does not support a structure of kind {kinds[0]}; it supports "
            f"{', '.join(traits.structures) or 'none'}. Send the request without it and check the response, or use "
            "the vLLM engine and a model folder with a tokenizer."
        )
    length = sum(map(len, structure.choices)) + sum(
        len(text) for text in (structure.json_schema, structure.regex, structure.grammar) if text is not None
    )
    if length > MAX_TEXT:
        raise EngineError(f"a structure must have at most {MAX_TEXT:,} characters; found {length:,}. Simplify it.")
