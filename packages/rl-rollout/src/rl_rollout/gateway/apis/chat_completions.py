"""OpenAI's Chat Completions API: parses requests and writes answers."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rl_core.data import Json
from rl_rollout.gateway.agent_requests import AgentRequest, Answer, StreamedAnswer
from rl_rollout.gateway.apis.reading import (
    Content,
    as_list,
    asks_for_usage,
    check_fields,
    content_of,
    read_conversation,
    read_schema,
    read_tools,
    text_of,
)
from rl_rollout.gateway.apis.streams import WireApi, data
from rl_rollout.gateway.messages import Call, ChatMessage
from rl_rollout.gateway.refusals import refused_field
from rl_rollout.gateway.sampling import read_sampling
from rl_rollout.gateway.tree import Sample

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
READ = (
    "messages", "model", "tools", "tool_choice", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "response_format",
)  # fmt: skip
WITHOUT_EFFECT = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity",
)  # fmt: skip
CHOICES = {"auto": "auto", "none": "none", "required": "required", "function": "named"}
A_TOOL = 'an object with type "function" and a function that has a name'


def read_chat_request(body: Mapping[str, Json]) -> AgentRequest:
    """Parse a Chat Completions request.

    Raises:
        RefusedError: A field is invalid or not supported.
    """
    check_fields(body, (*READ, *WITHOUT_EFFECT))
    given = as_list(body.get("messages"), "messages", "a list of at least one message")
    messages = [read_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    schema = read_schema(body.get("response_format"), "response_format", "json_schema")
    tools = read_tools(body.get("tools"), lambda tool: tool.get("type") == "function" and tool.get("function"), A_TOOL)
    return read_conversation(
        messages,
        choice=body.get("tool_choice"),
        tools=tools,
        kinds=CHOICES,
        sampling=read_sampling(body, max_tokens=limit, stop="stop", without_effect=WITHOUT_EFFECT, schema=schema),
        num_choices=body.get("n") or 1,
    )


class ChatCompletions(WireApi):
    """A Chat Completions request."""

    def __init__(self, body: Mapping[str, Json], model: str) -> None:
        """Parse a request; `model` is the model name in the answer.

        Raises:
            RefusedError: A field is invalid or not supported.
        """
        self.ask = read_chat_request(body)
        self._with_usage, self._with_logprobs = asks_for_usage(body), bool(body.get("logprobs"))
        self._head: dict[str, Json] = {"created": int(time.time()), "model": model}

    def whole(self, answer: Answer) -> str:
        """Return the answer as JSON."""
        choices = [
            {
                "index": index,
                "message": _answered(sample),
                "finish_reason": finish_reason(sample),
                "logprobs": _logprobs(answer, sample) if self._with_logprobs else None,
            }
            for index, sample in enumerate(answer.samples)
        ]
        head = {**self._head, "id": f"chatcmpl-{answer.name}", "object": "chat.completion"}
        whole = ChatCompletion.model_validate({**head, "choices": choices, "usage": usage(answer)})
        return whole.model_dump_json(exclude_unset=True)

    def begin(self, live: StreamedAnswer) -> Iterable[str]:
        """Yield the events at the start of a stream."""
        self._head |= {"id": f"chatcmpl-{live.name}", "object": "chat.completion.chunk"}
        for index in range(self.ask.num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, kind: str, delta: str) -> Iterable[str]:
        """Yield the events for new text of a choice."""
        delta_field = "content" if kind == "content" else "reasoning_content"
        choice = {"index": index, "delta": {delta_field: delta}, "finish_reason": None}
        yield data(msgspec.json.encode({**self._head, "choices": [choice]}).decode())  # `_chunk` is many times slower

    def end(self, answer: Answer) -> Iterable[str]:
        """Yield the tool calls and finish reason of each choice, and the usage if it was requested."""
        for index, sample in enumerate(answer.samples):
            for number, call in enumerate(sample.message.calls):
                yield self._chunk(index, {"tool_calls": [{"index": number, **_call(call)}]})
            logprobs = {"logprobs": _logprobs(answer, sample)} if self._with_logprobs else {}
            yield self._event([{"index": index, "delta": {}, "finish_reason": finish_reason(sample), **logprobs}])
        if self._with_usage:
            yield self._event([], usage=usage(answer))
        yield data("[DONE]")

    def _chunk(self, index: int, delta: Mapping[str, Json]) -> str:
        return self._event([{"index": index, "delta": delta, "finish_reason": None}])

    def _event(self, choices: Json, **fields: Json) -> str:
        chunk = ChatCompletionChunk.model_validate({**self._head, "choices": choices, **fields})
        return data(chunk.model_dump_json(exclude_unset=True))


def usage(answer: Answer) -> dict[str, Json]:
    """Return the token counts of an answer."""
    num_prompt, num_sampled = answer.num_prompt_tokens, answer.num_sampled
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def finish_reason(sample: Sample) -> str:
    """Return the finish reason of a choice."""
    return "tool_calls" if sample.message.calls else sample.generation.finish_reason


def read_message(message: Json, where: str) -> ChatMessage:
    """Parse a message; `where` is its place in the request.

    Raises:
        RefusedError: The message is invalid.
    """
    given = message.get("role") if isinstance(message, dict) else message
    if not isinstance(message, dict) or not isinstance(given, str) or given not in ROLES:
        raise refused_field(f"{where}.role", given, f"one of {[*ROLES]}")
    role: Any = ROLES[given]
    if message.get("function_call") is not None:
        raise refused_field(f"{where}.function_call", message["function_call"], "replaced by tool_calls")
    calls = [] if message.get("tool_calls") is None else message["tool_calls"]
    if not isinstance(calls, list):
        raise refused_field(f"{where}.tool_calls", calls, "a list of calls")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    content, place = message.get("content"), f"{where}.content"
    said = content_of(content, place) if role in ("user", "tool") else Content(text_of(content, place))
    return ChatMessage(
        role=role,
        content=said.text,
        images=said.images,
        reasoning=reasoning if role == "assistant" and isinstance(reasoning, str) else "",
        calls=tuple(read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        call_id=str(message.get("tool_call_id") or ""),
    )


def read_call(call: Json, where: str) -> Call:
    """Parse a tool call; `where` is its place in the request.

    Raises:
        RefusedError: The call is invalid.
    """
    held = call if isinstance(call, dict) else {}
    return read_function(held.get("function"), f"{where}.function", call_id=str(held.get("id") or ""))


def read_function(function: Json, where: str, *, call_id: str) -> Call:
    """Parse the name and arguments of a tool call; `where` is their place in the request.

    Raises:
        RefusedError: The call is invalid.
    """
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused_field(where, function, "an object with a name and arguments")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise refused_field(f"{where}.arguments", arguments, "a JSON string")
    return Call(name=function["name"], arguments=arguments, call_id=call_id)


def _answered(sample: Sample) -> dict[str, Json]:
    message = sample.message
    answered: dict[str, Json] = {"role": "assistant", "content": message.content or None}
    if message.reasoning:
        answered["reasoning_content"] = message.reasoning
    if message.calls:
        answered["tool_calls"] = [_call(call) for call in message.calls]
    return answered


def _call(call: Call) -> dict[str, Json]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(answer: Answer, sample: Sample) -> dict[str, Json]:
    pairs = zip(answer.texts_of(sample), sample.generation.logprobs.tolist(), strict=True)
    content = [
        {"token": text, "bytes": [*text.encode()], "logprob": logprob, "top_logprobs": []} for text, logprob in pairs
    ]
    return {"content": content, "refusal": None}
