"""Anthropic's Messages: requests read, answers written."""

import json
from collections.abc import Iterator, Mapping

from anthropic.types import Message

from rl_core.data import Json
from rl_rollout.gateway.asks import Answer, Ask
from rl_rollout.gateway.chat_completions import tool_schema
from rl_rollout.gateway.messages import Call, ChatMessage
from rl_rollout.gateway.refusals import RefusedError, refused_field
from rl_rollout.gateway.sampling import read_wishes
from rl_rollout.gateway.tree import Sample

READ = {
    "messages", "model", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "temperature",
    "top_p", "top_k", "output_config",
}  # fmt: skip
WITHOUT_EFFECT = (
    "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
    "thinking", "user_profile_id", "workspace_id",
)  # fmt: skip
Event = tuple[str, dict[str, Json]]
"""Name and data of an event of a stream."""


def read_messages_request(body: Mapping[str, Json], *, needs_limit: bool = True) -> Ask:
    """A request.

    Args:
        body: The request.
        needs_limit: Whether it must say max_tokens.

    Raises:
        RefusedError: A field cannot be what it is, or cannot be honoured.
    """
    for name, value in body.items():
        if value is not None and name not in READ and name not in WITHOUT_EFFECT:
            raise RefusedError(f"this server cannot honour {name}. Leave it out.", param=name)
    if needs_limit and body.get("max_tokens") is None:
        raise refused_field("max_tokens", None, "an integer of at least 1")
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise refused_field("messages", given, "a list of at least one message")
    messages = [one for index, each in enumerate(given) for one in _messages(each, f"messages[{index}]")]
    if messages[-1].role == "assistant":
        raise refused_field(
            "messages", "an assistant's message at the end", "ended by a user's message: nothing is prefilled"
        )
    if body.get("system"):
        system = _texts(body["system"], "system")
        messages.insert(0, ChatMessage(role="system", content=system))
    choice = _choice(body)
    is_free = choice.get("type") in ("auto", "none") and not choice.get("disable_parallel_tool_use")
    return Ask(
        messages=tuple(messages),
        tools=_tools(body),
        may_call=choice.get("type") != "none",
        wishes=read_wishes(
            body,
            max_tokens="max_tokens",
            stop="stop_sequences",
            without_effect=WITHOUT_EFFECT if is_free else (*WITHOUT_EFFECT, "tool_choice"),
            schema=_schema(body),
        ),
    )


def messages_response(answer: Answer, *, model: str) -> Message:
    """The whole answer."""
    (sample,) = answer.samples
    return Message.model_validate(
        {
            "id": message_id(answer.name),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": _blocks(sample),
            "stop_reason": _stop_reason(sample),
            "stop_sequence": sample.generation.matched_stop,
            "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(sample.generation.token_ids)},
        }
    )


def start_event(name: str, *, model: str, num_prompt_tokens: int) -> Event:
    """The event that begins a stream."""
    message = Message.model_validate(
        {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "usage": {"input_tokens": num_prompt_tokens, "output_tokens": 0},
        }
    )
    return "message_start", {"type": "message_start", "message": message.model_dump()}


class BlockEvents:
    """The events of a stream's content: blocks of thinking, text and calls, one after the other."""

    def __init__(self) -> None:
        """Begin with no block."""
        self._index = -1
        self._kind = ""

    def text(self, kind: str, delta: str) -> Iterator[Event]:
        """More "thinking" or "text"."""
        if kind != self._kind:
            yield from self._open(kind, {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}[kind])
        yield self._delta({"type": f"{kind}_delta", kind: delta})

    def call(self, call: Call) -> Iterator[Event]:
        """A call, whole."""
        yield from self._open("tool_use", {"id": call.call_id, "name": call.name, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def close(self) -> Iterator[Event]:
        """End the block that is open."""
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._kind:
            yield "content_block_stop", {"type": "content_block_stop", "index": self._index}
        self._kind = ""

    def _open(self, kind: str, fields: Mapping[str, Json]) -> Iterator[Event]:
        yield from self.close()
        self._index, self._kind = self._index + 1, kind
        block = {"type": kind, **fields}
        yield "content_block_start", {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Json]) -> Event:
        return "content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta}


SIGNATURE = "rl-rollout"
"""Of thinking; clients send it back, and nobody checks it."""


def end_events(answer: Answer, blocks: BlockEvents) -> Iterator[Event]:
    """The events that end a stream: the calls, and why and after how many tokens it ended."""
    (sample,) = answer.samples
    for call in sample.message.calls:
        yield from blocks.call(call)
    yield from blocks.close()
    delta = {"stop_reason": _stop_reason(sample), "stop_sequence": sample.generation.matched_stop}
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(sample.generation.token_ids)}
    yield "message_delta", {"type": "message_delta", "delta": delta, "usage": usage}
    yield "message_stop", {"type": "message_stop"}


def message_id(name: str) -> str:
    """Of an answer, by the request's name."""
    return f"msg_{name}"


def _blocks(sample: Sample) -> list[dict[str, Json]]:
    message, blocks = sample.message, []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    used = ((call, json.loads(call.arguments)) for call in message.calls)
    return [*blocks, *({"type": "tool_use", "id": call.call_id, "name": call.name, "input": put} for call, put in used)]


def _stop_reason(sample: Sample) -> str:
    if sample.message.calls:
        return "tool_use"
    if sample.generation.matched_stop is not None:
        return "stop_sequence"
    return "max_tokens" if sample.generation.finish_reason == "length" else "end_turn"


def _messages(message: Json, where: str) -> Iterator[ChatMessage]:
    """A message as the chat template's: results of tools are messages of their own, before the user's text."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise refused_field(f"{where}.role", role, '"user" or "assistant"')
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise refused_field(f"{where}.content", content, "a text or a list of blocks")
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        place, kind = f"{where}.content[{index}]", block.get("type")
        if kind == "text":
            texts.append(_text(block, "text", place))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_text(block, "thinking", place))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(
                Call(name=_text(block, "name", place), arguments=arguments, call_id=str(block.get("id") or ""))
            )
        elif kind == "tool_result" and role == "user":
            result = _texts(block.get("content") or "", f"{place}.content")
            yield ChatMessage(role="tool", content=result, call_id=str(block.get("tool_use_id") or ""))
        elif kind != "redacted_thinking":
            raise refused_field(f"{place}.type", kind, "text, thinking, tool_use or tool_result, in its role")
    if role == "assistant" or texts:
        yield ChatMessage(role=role, content="".join(texts), reasoning="".join(thoughts), calls=tuple(calls))


def _texts(content: Json, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused_field(where, content, "a text or a list of text blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, dict) else block
            raise refused_field(f"{where}[{index}].type", kind, '"text": this policy reads text alone')
    return "\n".join(_text(block, "text", f"{where}[{index}]") for index, block in enumerate(content))


def _text(block: Mapping[str, Json], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise refused_field(f"{where}.{name}", text, "a text")
    return text


def _schema(body: Mapping[str, Json]) -> Json:
    """The schema that a response must follow; None where there is none."""
    match body.get("output_config") or {}:
        case {"format": {"type": "json_schema", "schema": dict(schema)}}:
            return schema
        case {"format": form} if form is not None:
            raise refused_field("output_config.format", form, 'of type "json_schema", with a schema')
        case dict():
            return None
        case config:
            raise refused_field("output_config", config, "an object")


def _choice(body: Mapping[str, Json]) -> Mapping[str, Json]:
    """How the model may call; that it must, which tool, or one at a time, is reported as ignored."""
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none", "any", "tool"):
        raise refused_field("tool_choice", choice, 'an object of type "auto", "none", "any" or "tool"')
    return choice


def _tools(body: Mapping[str, Json]) -> tuple[Mapping[str, Json], ...]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise refused_field("tools", tools, "a list of tools")
    for index, tool in enumerate(tools):
        is_own = isinstance(tool, dict) and tool.get("type", "custom") in ("custom", None)
        if not is_own or not isinstance(tool.get("name"), str):
            raise refused_field(f"tools[{index}]", tool, "a tool of the client with name and input_schema")
    return tuple(
        tool_schema(name=one["name"], description=one.get("description"), parameters=one.get("input_schema"))
        for one in tools
    )
