"""Anthropic's Messages API: parses requests and writes answers."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anthropic.types import Message

from rl_core.data import Json
from rl_rollout.gateway.agent_requests import AgentRequest, Answer, StreamedAnswer
from rl_rollout.gateway.apis.reading import (
    as_list,
    as_object,
    check_fields,
    content_of,
    read_conversation,
    read_schema,
    read_tools,
    text_field,
    text_of,
)
from rl_rollout.gateway.apis.streams import WireApi
from rl_rollout.gateway.images import KeptImage
from rl_rollout.gateway.messages import Call, ChatMessage, MessageImage
from rl_rollout.gateway.refusals import RefusedError, refused_field
from rl_rollout.gateway.sampling import read_sampling
from rl_rollout.gateway.tree import Sample

READ = (
    "messages", "model", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "temperature",
    "top_p", "top_k", "output_config",
)  # fmt: skip
WITHOUT_EFFECT = (
    "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
    "thinking", "user_profile_id", "workspace_id",
)  # fmt: skip
CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "named"}
A_TOOL = "a tool of the client with name and input_schema"
SIGNATURE = "rl-rollout"
"""Signature of thinking blocks. Clients return it, and it is never checked."""


def read_messages_request(body: Mapping[str, Json], *, needs_limit: bool = True) -> AgentRequest:
    """Parse a Messages request.

    Args:
        body: The request body.
        needs_limit: Require max_tokens.

    Raises:
        RefusedError: A field is invalid or not supported.
    """
    if body.get("thread") is not None:
        raise RefusedError(
            "this server stores no messages. Send the entire conversation, without thread; with the SDK, set "
            'unsupported_request_behavior = "continue_unthreaded".',
            param="thread",
            code="thread_unsupported_request",
        )
    check_fields(body, (*READ, *WITHOUT_EFFECT))
    if needs_limit and body.get("max_tokens") is None:
        raise refused_field("max_tokens", None, "an integer of at least 1")
    given = as_list(body.get("messages"), "messages", "a list of at least one message")
    messages = [one for index, each in enumerate(given) for one in _messages(each, f"messages[{index}]")]
    choice, config = body.get("tool_choice"), body.get("output_config") or {}
    is_serial = isinstance(choice, dict) and bool(choice.get("disable_parallel_tool_use"))
    tools = read_tools(
        body.get("tools"), lambda tool: tool.get("type") in ("custom", None) and tool, A_TOOL, schema="input_schema"
    )
    return read_conversation(
        messages,
        system=text_of(body.get("system"), "system", between="\n"),
        choice=choice,
        tools=tools,
        kinds=CHOICES,
        sampling=read_sampling(
            body,
            max_tokens="max_tokens",
            stop="stop_sequences",
            without_effect=(*WITHOUT_EFFECT, "tool_choice") if is_serial else WITHOUT_EFFECT,
            schema=read_schema(config.get("format"), "output_config.format"),
            schema_field="output_config.format",
        ),
    )


class AnthropicMessages(WireApi):
    """A Messages request."""

    ping = 'event: ping\ndata: {"type": "ping"}\n\n'
    names: Mapping[str, str] = {"stop": "stop_sequences"}

    def __init__(self, body: Mapping[str, Json], model: str) -> None:
        """Parse a request; `model` is the model name in the answer.

        Raises:
            RefusedError: A field is invalid or not supported.
        """
        self.ask = read_messages_request(body)
        self._model = model
        self._index, self._kind = -1, ""

    def whole(self, answer: Answer) -> str:
        """Return the answer as JSON."""
        (sample,) = answer.samples
        usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled}
        message = self._message(answer.name, usage, content=_blocks(sample), **_stopped(sample))
        return message.model_dump_json(exclude_unset=True)  # null for unset fields would break strict clients

    def begin(self, live: StreamedAnswer) -> Iterable[str]:
        """Yield the events at the start of a stream."""
        usage = {"input_tokens": live.num_prompt_tokens, "output_tokens": 0}
        message = self._message(live.name, usage, content=[], stop_reason=None, stop_sequence=None)
        yield _event("message_start", message=message.model_dump(exclude_unset=True))

    def piece(self, index: int, kind: str, delta: str) -> Iterable[str]:  # noqa: ARG002 - there is one choice
        """Yield the events for new text."""
        kind = "text" if kind == "content" else "thinking"
        if kind != self._kind:
            yield from self._open(kind, {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}[kind])
        yield self._delta({"type": f"{kind}_delta", kind: delta})

    def end(self, answer: Answer) -> Iterable[str]:
        """Yield the tool calls, the stop reason and the usage."""
        (sample,) = answer.samples
        for call in sample.message.calls:
            yield from self._open("tool_use", {"id": call.call_id, "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield from self._close()
        usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled}
        yield _event("message_delta", delta=_stopped(sample), usage=usage)
        yield _event("message_stop")

    def fail(self, error: RefusedError) -> str:
        """Return the event for an error."""
        return f"event: error\ndata: {json.dumps(error.as_anthropic())}\n\n"

    def _message(self, name: str, usage: Mapping[str, Json], **fields: Json) -> Message:
        head = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": self._model}
        return Message.model_validate({**head, "usage": usage, **fields})

    def _open(self, kind: str, fields: Mapping[str, Json]) -> Iterable[str]:
        yield from self._close()
        self._index, self._kind = self._index + 1, kind
        yield _event("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _close(self) -> Iterable[str]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._kind:
            yield _event("content_block_stop", index=self._index)
        self._kind = ""

    def _delta(self, delta: Mapping[str, Json]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(name: str, **fields: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"


def _stopped(sample: Sample) -> dict[str, Json]:
    stop, is_cut = sample.generation.matched_stop, sample.generation.finish_reason == "length"
    reason = "stop_sequence" if stop is not None else "max_tokens" if is_cut else "end_turn"
    return {"stop_reason": "tool_use" if sample.message.calls else reason, "stop_sequence": stop}


def _blocks(sample: Sample) -> list[dict[str, Json]]:
    message, blocks = sample.message, []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    used = ((call, json.loads(call.arguments)) for call in message.calls)
    return [*blocks, *({"type": "tool_use", "id": call.call_id, "name": call.name, "input": put} for call, put in used)]


def _messages(message: Json, where: str) -> Iterator[ChatMessage]:
    """Convert a message for the chat template; tool results become separate messages before the user's text."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise refused_field(f"{where}.role", role, '"user" or "assistant"')
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict | KeptImage) for block in blocks):
        raise refused_field(f"{where}.content", content, "a string or a list of blocks")
    texts: list[str] = []
    images: list[MessageImage] = []
    thoughts, calls = [], []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        kind = "image" if isinstance(block, KeptImage) else block.get("type")
        if isinstance(block, KeptImage) and role == "user":
            images.append(MessageImage(len("".join(texts)), block.digest))
        elif kind == "text":
            texts.append(text_field(block, "text", place))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(text_field(block, "thinking", place))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(as_object(block.get("input"), f"{place}.input"), ensure_ascii=False)
            name, call_id = text_field(block, "name", place), str(block.get("id") or "")
            calls.append(Call(name=name, arguments=arguments, call_id=call_id))
        elif kind == "tool_result" and role == "user":
            result = content_of(block.get("content"), f"{place}.content", between="\n")
            if block.get("is_error") and not result.text.startswith("Error"):
                result = result.after("Error: ")  # chat templates have no field for it
            call_id = str(block.get("tool_use_id") or "")
            yield ChatMessage(role="tool", content=result.text, images=result.images, call_id=call_id)
        elif kind != "redacted_thinking":
            raise refused_field(f"{place}.type", kind, "text, thinking, tool_use or tool_result, with a matching role")
    if role == "assistant" or texts or images:
        yield ChatMessage(
            role=role,
            content="".join(texts),
            images=tuple(images),
            reasoning="".join(thoughts),
            calls=tuple(calls),
        )
