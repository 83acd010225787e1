"""Checks which parts of a request the engine supports, and which can train."""

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from rl_core.errors import EngineError
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, Structure
from rl_rollout.engines.requests import check_request
from rl_rollout.gateway.asks import Ask
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.sampling import DecidedBy
from rl_rollout.prompts.tokenizer import PromptTokenizer

MAX_CHARS_PER_TOKEN = 32
"""Tokens of text have fewer by far; those of long runs of spaces alone have more."""


class GatewayEngine(Protocol):
    """What a gateway asks of an engine; see `RolloutEngine`, which has it all."""

    @property
    def traits(self) -> EngineTraits: ...  # noqa: D102

    async def generate(self, request: GenerateRequest) -> list[Generation]: ...  # noqa: D102

    async def abort(self, request_ids: Collection[str]) -> None: ...  # noqa: D102


def check_asked(request: GenerateRequest, traits: EngineTraits) -> None:
    """Refuse what the client asks for and the engine cannot do: this is no fault of the engine.

    Raises:
        RefusedError: Says what.
    """
    try:
        check_request(request, traits)
    except EngineError as error:
        raise RefusedError(str(error)) from error


def within_means(ask: Ask, traits: EngineTraits, tokenizer: PromptTokenizer, *, decided_by: DecidedBy) -> Ask:
    """The request as tokens and structures; a call that cannot be had by force is left to the model, and reported.

    Raises:
        RefusedError: Names the field that cannot be honoured, or that cannot train.
    """
    check_length(ask, traits)
    wishes, may_force = ask.wishes, decided_by == "client" or not ask.trains
    if wishes.stop and not traits.can_match_text:
        raise RefusedError("this engine cannot end a response at stop strings. Leave stop out.", param="stop")
    if isinstance(ask.prompt, str):
        ask = replace(ask, prompt=tokenizer.encode([ask.prompt], add_special_tokens=True)[0])
    elif ask.prompt and not 0 <= min(ask.prompt) <= max(ask.prompt) < traits.vocab_size:
        raise RefusedError(f"token ids of a prompt must be from 0 to {traits.vocab_size - 1}.", param="prompt")
    if ask.must_call and may_force and "json_schema" in traits.structures and wishes.structure is None:
        return replace(ask, wishes=replace(wishes, structure=Structure(json_schema=json.dumps(ask.must_call))))
    if ask.must_call:
        ignored = replace(wishes, without_effect=(*wishes.without_effect, "tool_choice"))
        ask = replace(ask, must_call=None, wishes=ignored)
    if wishes.structure is None:
        return ask
    if not set(wishes.structure.kinds) <= set(traits.structures):
        raise RefusedError("this engine cannot follow a structure. Leave response_format out.", param="response_format")
    if not may_force:
        raise RefusedError(
            "what is sampled under a structure cannot train: its logprobs are those of another distribution. Leave "
            "response_format out, or send the header x-rl-train: false.",
            param="response_format",
        )
    return ask


def check_length(ask: Ask, traits: EngineTraits) -> None:
    """Refuse what would take the event loop long to encode, for nothing.

    Raises:
        RefusedError: It has too many characters for any context.
    """
    if ask.num_chars > MAX_CHARS_PER_TOKEN * traits.max_model_len:
        raise too_long(f"{ask.num_chars} characters", traits)


def too_long(size: str, traits: EngineTraits) -> RefusedError:
    """That a conversation fits no context, with the code that agents look for."""
    return RefusedError(
        f"the conversation has {size}; this model's maximum context length is {traits.max_model_len} tokens. "
        "Shorten the messages.",
        param="messages",
        code="context_length_exceeded",
    )
