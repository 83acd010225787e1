"""OpenAI's Responses API: parses requests and writes answers. Each request must have the entire conversation."""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from openai.types.responses import Response

from rl_core.data import Json
from rl_rollout.gateway.agent_requests import AgentRequest, Answer, StreamedAnswer
from rl_rollout.gateway.apis.chat_completions import read_function, read_message
from rl_rollout.gateway.apis.reading import (
    as_list,
    check_fields,
    content_of,
    read_conversation,
    read_schema,
    read_tools,
    text_of,
)
from rl_rollout.gateway.apis.streams import WireApi
from rl_rollout.gateway.messages import Call, ChatMessage
from rl_rollout.gateway.refusals import RefusedError, refused_field
from rl_rollout.gateway.sampling import read_sampling
from rl_rollout.gateway.sessions import Session

READ = (
    "input", "model", "instructions", "tools", "tool_choice", "stream", "max_output_tokens", "temperature", "top_p",
    "text",
)  # fmt: skip
WITHOUT_EFFECT = (
    "client_metadata", "include", "max_tool_calls", "metadata", "parallel_tool_calls", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store",
    "stream_options", "user",
)  # fmt: skip
CHOICES = {"auto": "auto", "none": "none", "required": "required", "function": "named"}
A_TOOL = 'an object with type "function" and a name, or with type "namespace" and such tools'
SPARE_DEPTH = 100
"""How much deeper than what a client sent the stack may be while an answer repeats it."""
NAMESPACE_END = "__"
"""Separates a namespace from the tool's name, in the name that the model reads and writes."""


class Kind(NamedTuple):
    """Format of an output item.

    Attributes:
        prefix: Prefix of the item's id.
        part: Type of its text part.
        of_item: Further fields of the item.
        of_part: Further fields of the text part.
        of_event: Further fields of the text part's events.
    """

    prefix: str
    part: str
    of_item: Mapping[str, Json]
    of_part: Mapping[str, Json]
    of_event: Mapping[str, Json]


KINDS = {
    "reasoning": Kind("rs", "reasoning_text", {"type": "reasoning", "summary": []}, {}, {}),
    "content": Kind(
        "msg", "output_text", {"type": "message", "role": "assistant"}, {"annotations": []}, {"logprobs": []}
    ),
}


def read_responses_request(body: Mapping[str, Json]) -> AgentRequest:
    """Parse a Responses request.

    Raises:
        RefusedError: A field is invalid or not supported.
    """
    if body.get("previous_response_id") is not None:
        raise RefusedError(
            "this server stores no responses. Send the entire conversation as input, without previous_response_id.",
            param="previous_response_id",
            code="unsupported_parameter",
        )
    check_fields(body, (*READ, *WITHOUT_EFFECT))
    text = body.get("text") or {}
    tools = read_tools(_flat(body.get("tools")), lambda tool: tool.get("type") == "function" and tool, A_TOOL)
    schema = read_schema(text.get("format"), "text.format")
    fields = {"max_tokens": "max_output_tokens", "stop": "stop", "schema_field": "text.format"}
    sampling = read_sampling(body, without_effect=WITHOUT_EFFECT, schema=schema, **fields)
    return read_conversation(
        _messages(body.get("input")),
        where="input",
        system=text_of(body.get("instructions"), "instructions"),
        choice=body.get("tool_choice"),
        tools=tools,
        kinds=CHOICES,
        sampling=sampling,
    )


def with_items(body: dict[str, Json], session: Session) -> dict[str, Json]:
    """Return a request with the items of the session's answers instead of references to them.

    Raises:
        RefusedError: A reference names no item of the session.
    """
    given = body.get("input")
    if not isinstance(given, list) or not any(map(_is_reference, given)):
        return body
    items: dict[str, Json] = {}
    for sample in session.tree.samples:
        name = f"{session.session_id}-{sample.request_index}"
        for kind, text in (("reasoning", sample.message.reasoning), ("content", sample.message.content)):
            items[f"{KINDS[kind].prefix}_{name}"] = _item(name, kind, text)
        items |= {f"fc_{call.call_id}": _call(call, {}) for call in sample.message.calls}
    written: list[Json] = []
    for index, item in enumerate(given):
        found = items.get(str(item.get("id"))) if _is_reference(item) else item
        if found is None:
            raise refused_field(f"input[{index}].id", item.get("id"), "the id of an item in an answer of this session")
        written.append(found)
    return {**body, "input": written}


class Responses(WireApi):
    """A Responses request."""

    names: Mapping[str, str] = {"messages": "input"}

    def __init__(self, body: Mapping[str, Json], model: str) -> None:
        """Parse a request; `model` is the model name in the answer.

        Raises:
            RefusedError: A field is invalid or not supported.
        """
        self.ask = read_responses_request(body)
        self._head: dict[str, Json] = {
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": None,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "store": False,
        }
        self._echo = _echo(body)
        self._namespaces = _namespaces(body.get("tools"))
        self._name = ""
        self._num_events, self._num_items = 0, 0
        self._kind, self._said = "", ""

    def whole(self, answer: Answer) -> str:
        """Return the answer as JSON."""
        return json.dumps(self._response(answer))

    def begin(self, live: StreamedAnswer) -> Iterable[str]:
        """Yield the events at the start of a stream."""
        self._name = live.name
        begun = {**self._head, **self._echo, "id": f"resp_{live.name}", "status": "in_progress", "output": []}
        for event in ("created", "in_progress"):
            yield self._event(f"response.{event}", response=begun)

    def piece(self, index: int, kind: str, delta: str) -> Iterable[str]:  # noqa: ARG002 - there is one choice
        """Yield the events for new text."""
        if kind != self._kind:
            yield from self._close()
            self._kind = kind
            yield self._item("added", _item(self._name, kind, None))
            yield self._part("content_part.added", part=_part(kind, ""))
        self._said += delta
        yield self._part(f"{KINDS[kind].part}.delta", delta=delta, **KINDS[kind].of_event)

    def end(self, answer: Answer) -> Iterable[str]:
        """Yield the tool calls and the complete response."""
        yield from self._close()
        message = answer.samples[0].message
        if not (message.content or message.calls):
            yield from self.piece(0, "content", "")
            yield from self._close()
        for call in message.calls:
            made = _call(call, self._namespaces)
            yield self._item("added", {**made, "arguments": "", "status": "in_progress"})
            for event, field in (("delta", "delta"), ("done", "arguments")):
                place = {"item_id": made["id"], "output_index": self._num_items, field: call.arguments}
                yield self._event(f"response.function_call_arguments.{event}", name=made["name"], **place)
            yield self._item("done", made)
        response = self._response(answer)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: RefusedError) -> str:
        """Return the event for an error."""
        return self._event("error", code=error.code or error.kind, message=str(error), param=error.param)

    def _close(self) -> Iterable[str]:
        """Yield the events that end the open item."""
        kind, said = self._kind, self._said
        if kind:
            yield self._part(f"{KINDS[kind].part}.done", text=said, **KINDS[kind].of_event)
            yield self._part("content_part.done", part=_part(kind, said))
            yield self._item("done", _item(self._name, kind, said))
        self._kind = self._said = ""

    def _item(self, what: str, item: Mapping[str, Json]) -> str:
        place, self._num_items = self._num_items, self._num_items + (what == "done")
        return self._event(f"response.output_item.{what}", output_index=place, item=item)

    def _part(self, event: str, **fields: Json) -> str:
        item_id = f"{KINDS[self._kind].prefix}_{self._name}"
        place = {"item_id": item_id, "output_index": self._num_items, "content_index": 0}
        return self._event(f"response.{event}", **place, **fields)

    def _event(self, name: str, /, **fields: Json) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        written = json.dumps({"type": name, "sequence_number": number, **fields})
        return f"event: {name}\ndata: {written}\n\n"

    def _response(self, answer: Answer) -> dict[str, Any]:
        (sample,) = answer.samples
        message, is_cut = sample.message, sample.generation.finish_reason == "length"
        said = {"reasoning": message.reasoning, "content": message.content}
        items = [_item(answer.name, kind, text) for kind, text in said.items() if text]
        if not message.content and not message.calls:
            items.append(_item(answer.name, "content", ""))
        usage = {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
        }
        response = {
            **self._head,
            "id": f"resp_{answer.name}",
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*items, *(_call(call, self._namespaces) for call in message.calls)],
            "usage": usage,
        }
        return {**Response.model_validate(response).model_dump(mode="json", exclude_unset=True), **self._echo}


def _echo(body: Mapping[str, Json]) -> dict[str, Json]:
    """Return the fields that answers repeat as the client sent them, even where OpenAI's own types are stricter.

    Raises:
        RecursionError: A field is nested so deeply that writing an answer might fail.
    """
    echo = {name: body[name] for name in ("instructions", "tools", "tool_choice") if body.get(name) is not None}
    nested: Json = echo
    for _ in range(SPARE_DEPTH):
        nested = [nested]
    json.dumps(nested)
    return echo


def _part(kind: str, text: str) -> dict[str, Json]:
    return {"type": KINDS[kind].part, "text": text, **KINDS[kind].of_part}


def _item(name: str, kind: str, text: str | None) -> dict[str, Json]:
    """Return an item of reasoning or of a message; `text` is None while it is streamed."""
    status, content = ("in_progress", []) if text is None else ("completed", [_part(kind, text)])
    return {"id": f"{KINDS[kind].prefix}_{name}", "status": status, "content": content, **KINDS[kind].of_item}


def _call(call: Call, namespaces: Mapping[str, str]) -> dict[str, Json]:
    made = {"type": "function_call", "id": f"fc_{call.call_id}", "call_id": call.call_id, "status": "completed"}
    if (namespace := namespaces.get(call.name)) is not None:
        made |= {"namespace": namespace}
    name = call.name if namespace is None else call.name.removeprefix(namespace + NAMESPACE_END)
    return {**made, "name": name, "arguments": call.arguments}


def _is_reference(item: Json) -> bool:
    return isinstance(item, dict) and (item.get("type") == "item_reference" or [*item] == ["id"])


def _flat(tools: Json) -> list[Any]:
    """Return the tools, with those of a namespace under their full names and with the field `namespace`."""
    flat: list[Json] = []
    for tool in tools or ():
        match tool:
            case {"type": "namespace", "name": str(namespace), "tools": list(inner)}:
                flat += (_full(one, namespace) for one in inner)
            case _:
                flat.append(tool)
    return flat


def _full(named: Json, namespace: Json) -> Json:
    """Return a tool or a call of a namespace, with the name that the model reads and writes."""
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        return named
    return {**named, "name": f"{namespace}{NAMESPACE_END}{named['name']}", "namespace": namespace}


def _namespaces(tools: Json) -> dict[str, str]:
    """Return the namespace of each tool that has one, by its full name."""
    return {tool["name"]: tool["namespace"] for tool in _flat(tools) if isinstance(tool.get("namespace"), str)}


def _messages(given: Json) -> list[ChatMessage]:
    """Return the messages of a conversation, in which one turn of the model has several items."""
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    messages: list[ChatMessage] = []
    turn: dict[str, Any] = {}
    for index, item in enumerate(as_list(given, "input", "a string or a list of at least one item")):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise refused_field(where, item, "an object")
        kind = item.get("type") or "message"
        is_said = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        if turn and (not is_said or kind == "reasoning" or (kind == "message" and len(turn) > ("reasoning" in turn))):
            messages.append(ChatMessage(role="assistant", **turn))
            turn = {}
        if kind == "reasoning":
            turn["reasoning"] = text_of(item.get("content") or item.get("summary"), f"{where}.content")
        elif kind == "function_call":
            called = _full(item, item["namespace"]) if item.get("namespace") else item
            call = read_function(called, where, call_id=str(item.get("call_id") or ""))
            turn["calls"] = (*turn.get("calls", ()), call)
        elif kind == "function_call_output":
            output, images = content_of(item.get("output"), f"{where}.output")
            call_id = str(item.get("call_id") or "")
            messages.append(ChatMessage(role="tool", content=output, images=images, call_id=call_id))
        elif kind == "message" and is_said:
            turn["content"] = text_of(item.get("content"), f"{where}.content")
        elif kind == "message":
            messages.append(read_message(item, where))
        else:
            raise refused_field(f"{where}.type", kind, "message, reasoning, function_call or function_call_output")
    return [*messages, ChatMessage(role="assistant", **turn)] if turn else messages
