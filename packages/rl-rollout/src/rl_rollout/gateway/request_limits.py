"""Checks which parts of a request the engine supports, and which can train."""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

from rl_core.data import Json
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, Structure
from rl_rollout.gateway.agent_requests import AgentRequest
from rl_rollout.gateway.refusals import TOO_LONG, RefusedError

MAX_CHARS_PER_TOKEN = 32
"""Far above the average of any text."""
MAX_CHARS_WITHOUT_RUNS = 8
"""The same without runs of spaces, which may have over a hundred characters per token."""


class GatewayEngine(Protocol):
    """The part of `RolloutEngine` that a gateway needs."""

    @property
    def traits(self) -> EngineTraits: ...  # noqa: D102

    async def generate(self, request: GenerateRequest) -> list[Generation]: ...  # noqa: D102

    async def abort(self, request_ids: Collection[str]) -> None: ...  # noqa: D102


def limited(ask: AgentRequest, traits: EngineTraits, *, enforces: bool) -> AgentRequest:
    """Return the request with a forced call as a structure.

    If the engine cannot force a call, or nothing is enforced, the model decides and "tool_choice" has no effect. The
    same holds for a response format, except that it is refused if it must be enforced.

    Args:
        ask: The request.
        traits: The engine's traits.
        enforces: Enforce response formats and forced calls; False does so only for requests outside the task.

    Raises:
        RefusedError: A field cannot be honoured; the error names it.
    """
    check_length(ask, traits)
    sampling, may_force = ask.sampling, enforces or not ask.trains
    if sampling.stop and not traits.can_match_text:
        raise RefusedError("this engine does not support stop strings. Omit them.", param="stop")
    ids = () if isinstance(ask.prompt, str) or not ask.prompt else ask.prompt
    if ids and not 0 <= min(ids) <= max(ids) < traits.vocab_size:
        raise RefusedError(f"token ids of a prompt must be from 0 to {traits.vocab_size - 1}.", param="prompt")
    if ask.must_call and may_force and "json_schema" in traits.structures and sampling.structure is None:
        return replace(ask, sampling=replace(sampling, structure=Structure(json_schema=json.dumps(ask.must_call))))
    if ask.must_call:
        sampling = sampling.ignoring("tool_choice")
    name = sampling.structure_field
    if sampling.structure is not None and not (may_force and set(sampling.structure.kinds) <= set(traits.structures)):
        if enforces:
            raise RefusedError(f"this engine does not support structures. Omit {name}.", param=name)
        sampling = replace(sampling.ignoring(name), structure=None)
    return ask if sampling is ask.sampling else replace(ask, must_call=None, sampling=sampling)


def check_length(ask: AgentRequest, traits: EngineTraits) -> None:
    """Check the number of characters before encoding, which takes seconds for long texts.

    Raises:
        RefusedError: The request has too many characters, or tokens, for the model's context.
    """
    longest = traits.max_model_len
    if isinstance(ask.prompt, str) or ask.prompt is None:
        num_chars, num_others = ask.num_chars, ask.num_chars - 2 * ask.num_double_spaces
        if num_chars > MAX_CHARS_PER_TOKEN * longest or num_others > MAX_CHARS_WITHOUT_RUNS * longest:
            raise too_long(f"{num_chars} characters", traits)
    elif len(ask.prompt) >= longest:
        raise too_long(f"{len(ask.prompt)} tokens", traits)


def check_entries(body: Mapping[str, Json], traits: EngineTraits) -> None:
    """Check the number of messages, of their parts, and of tools, before they are read: each takes a token or more.

    Raises:
        RefusedError: There are more than fit into the model's context.
    """
    lists = [items for name in ("messages", "input", "system", "tools") if isinstance(items := body.get(name), list)]
    num_entries = sum(map(len, lists))
    if num_entries <= traits.max_model_len:
        contents = (item.get("content") for items in lists for item in items if isinstance(item, dict))
        num_entries += sum(len(content) for content in contents if isinstance(content, list))
    if num_entries > traits.max_model_len:
        raise too_long(f"{num_entries} messages, parts and tools", traits)


def too_long(size: str, traits: EngineTraits) -> RefusedError:
    """Return the error for a conversation beyond the context length, with the code that agents recognize."""
    return RefusedError(
        f"the conversation has {size}; this model's maximum context length is {traits.max_model_len} tokens. "
        "Shorten the messages.",
        param="messages",
        code=TOO_LONG,
    )
