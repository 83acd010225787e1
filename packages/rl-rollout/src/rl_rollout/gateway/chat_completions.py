"""OpenAI's Chat Completions: requests read, answers written."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rl_core.data import Json
from rl_rollout.gateway.asks import MAX_CHOICES, Answer, Ask
from rl_rollout.gateway.messages import Call, ChatMessage
from rl_rollout.gateway.refusals import RefusedError, refused_field
from rl_rollout.gateway.sampling import read_wishes
from rl_rollout.gateway.tree import Sample

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
READ = {
    "messages", "model", "tools", "tool_choice", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "response_format",
}  # fmt: skip
WITHOUT_EFFECT = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity",
)  # fmt: skip
NOTHING: Mapping[str, tuple[Json, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
}
"""Values of fields that ask for nothing; any other value is refused."""
SCHEMA_FIELDS = ("name", "description", "parameters")


def read_chat_request(body: Mapping[str, Json]) -> Ask:
    """A request.

    Raises:
        RefusedError: A field cannot be what it is, or cannot be honoured.
    """
    for name, value in body.items():
        is_known = value is None or name in WITHOUT_EFFECT or name in READ
        if not is_known and value not in NOTHING.get(name, ()):
            raise RefusedError(
                f"this server cannot honour {name}. Leave it out.", param=name, code="unsupported_parameter"
            )
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused_field("messages", messages, "a list of at least one message")
    num_choices = body.get("n") or 1
    if not isinstance(num_choices, int) or not 1 <= num_choices <= MAX_CHOICES:
        raise refused_field("n", num_choices, f"an integer from 1 to {MAX_CHOICES}")
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    choice = _choice(body)
    ignored = WITHOUT_EFFECT if choice in ("auto", "none") else (*WITHOUT_EFFECT, "tool_choice")
    return Ask(
        messages=tuple(_message(one, f"messages[{index}]") for index, one in enumerate(messages)),
        tools=_tools(body),
        may_call=choice != "none",
        wishes=read_wishes(body, max_tokens=limit, stop="stop", without_effect=ignored, schema=_schema(body)),
        num_choices=num_choices,
    )


def chat_response(answer: Answer, *, model: str, with_logprobs: bool) -> ChatCompletion:
    """The whole answer."""
    choices = [
        {
            "index": index,
            "message": _answered(sample),
            "finish_reason": finish_reason(sample),
            "logprobs": _logprobs(sample) if with_logprobs else None,
        }
        for index, sample in enumerate(answer.samples)
    ]
    return ChatCompletion.model_validate(
        {
            "id": completion_id(answer.name),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "usage": usage(answer),
        }
    )


def chunk(name: str, model: str, index: int, delta: Mapping[str, Json], finish: str | None = None) -> str:
    """One event of a stream, as JSON."""
    return ChatCompletionChunk.model_validate(
        {
            "id": name,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": index, "delta": delta, "finish_reason": finish}],
        }
    ).model_dump_json(exclude_unset=True)


def last_chunks(answer: Answer, *, name: str, model: str, with_usage: bool) -> Iterator[str]:
    """The events that end a stream: the calls, why each choice ended, and the usage where it was asked for."""
    for index, sample in enumerate(answer.samples):
        for number, call in enumerate(sample.message.calls):
            yield chunk(name, model, index, {"tool_calls": [{"index": number, **_call(call)}]})
        yield chunk(name, model, index, {}, finish_reason(sample))
    if with_usage:
        head = {"id": name, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        last = ChatCompletionChunk.model_validate({**head, "choices": [], "usage": usage(answer)})
        yield last.model_dump_json(exclude_unset=True)


def completion_id(name: str) -> str:
    """Of an answer, by the request's name."""
    return f"chatcmpl-{name}"


def usage(answer: Answer) -> dict[str, Json]:
    """Tokens of an answer."""
    sampled = sum(len(sample.generation.token_ids) for sample in answer.samples)
    return CompletionUsage(
        prompt_tokens=answer.num_prompt_tokens,
        completion_tokens=sampled,
        total_tokens=answer.num_prompt_tokens + sampled,
    ).model_dump(exclude_none=True)


def finish_reason(sample: Sample) -> str:
    """Why a choice ended."""
    return "tool_calls" if sample.message.calls else sample.generation.finish_reason


def text_of(content: Json, where: str) -> str:
    """The text of a message's content, its parts joined.

    Raises:
        RefusedError: A part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refused_field(where, content, "a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise refused_field(f"{where}[{index}].type", kind, '"text": this policy reads and writes text alone')
        text = part.get(part["type"])
        if not isinstance(text, str):
            raise refused_field(f"{where}[{index}].{part['type']}", text, "a text")
        texts.append(text)
    return "".join(texts)


def _message(message: Json, where: str) -> ChatMessage:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise refused_field(
            f"{where}.role", message.get("role") if isinstance(message, dict) else message, f"one of {[*ROLES]}"
        )
    role: Any = ROLES[message["role"]]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise refused_field(f"{where}.tool_calls", calls, "a list of calls")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return ChatMessage(
        role=role,
        content=text_of(message.get("content"), f"{where}.content"),
        reasoning=reasoning if role == "assistant" and isinstance(reasoning, str) else "",
        calls=tuple(_read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        call_id=str(message.get("tool_call_id") or ""),
    )


def _read_call(call: Json, where: str) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused_field(f"{where}.function", function, "an object with a name and arguments")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise refused_field(f"{where}.function.arguments", arguments, "a JSON text")
    return Call(name=function["name"], arguments=arguments, call_id=str(call.get("id") or ""))


def _schema(body: Mapping[str, Json]) -> Json:
    """The schema that a response must follow; None where there is none."""
    form = body.get("response_format") or {"type": "text"}
    match form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case _:
            raise refused_field(
                "response_format", form, 'of type "text", "json_object", or "json_schema" with a schema'
            )


def _choice(body: Mapping[str, Json]) -> str:
    """Whether the model may call; that it must, or which tool, is reported as ignored: frameworks often ask so."""
    choice = body.get("tool_choice") or "auto"
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("auto", "none", "required", "function"):
        raise refused_field("tool_choice", choice, '"auto", "none", "required" or a function')
    return str(kind)


def _tools(body: Mapping[str, Json]) -> tuple[Mapping[str, Json], ...]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise refused_field("tools", tools, "a list of functions")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or tool.get("type") != "function"
        ):
            raise refused_field(
                f"tools[{index}]", tool, 'an object with type "function" and a function that has a name'
            )
    return tuple(tool_schema(**{name: tool["function"].get(name) for name in SCHEMA_FIELDS}) for tool in tools)


def tool_schema(*, name: str, description: Json, parameters: Json) -> dict[str, Json]:
    """A tool as chat templates take it."""
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


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


def _logprobs(sample: Sample) -> dict[str, Json]:
    generation = sample.generation
    pairs = zip(generation.token_ids.tolist(), generation.logprobs.tolist(), strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []} for token, logprob in pairs]
    return {"content": content, "refusal": None}
