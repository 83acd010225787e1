"""Parses the fields that are common to the requests of all APIs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rl_core.data import Json
from rl_rollout.gateway.agent_requests import AgentRequest
from rl_rollout.gateway.images import KeptImage
from rl_rollout.gateway.messages import ChatMessage, MessageImage
from rl_rollout.gateway.refusals import RefusedError, brief, refused_field

Tools = tuple[Mapping[str, Any], ...]
NOTHING: Mapping[str, tuple[Json, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Values with which an unsupported field is accepted, since they have no effect; any other value is refused."""
AN_OBJECT = (dict, "an object")
TYPES: Mapping[str, tuple[Any, str]] = {
    "logprobs": (bool | int, "true or false"),
    "output_config": AN_OBJECT,
    "stream": (bool | int, "true or false"),
    "stream_options": AN_OBJECT,
    "system": (str | list, "a string or a list of text parts"),
    "text": AN_OBJECT,
    "tools": (list, "a list of tools"),
}
"""Types of fields, and their descriptions for errors. Other fields are checked where they are read."""
TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
"""Types of content parts that are text."""


def check_fields(body: Mapping[str, Json], known: Collection[str]) -> None:
    """Check that all fields are known and of their type, or have a value without effect.

    Raises:
        RefusedError: A field is not supported or has another type; the error names the first one.
    """
    for name, value in body.items():
        kind, expected = TYPES.get(name, (object, ""))
        if value is None:
            continue
        nothing = [(one, type(one) is bool) for one in NOTHING.get(name, ())]  # since 1 == True
        if name not in known and (value, type(value) is bool) not in nothing:
            raise RefusedError(
                f"this server does not support {name} = {brief(value)}. Omit it.",
                param=name,
                code="unsupported_parameter",
            )
        if not isinstance(value, kind):
            raise refused_field(name, value, expected)


def read_conversation(
    messages: Sequence[ChatMessage],
    *,
    where: str = "messages",
    system: str = "",
    choice: Json,
    tools: Tools,
    kinds: Mapping[str, str],
    **fields: Any,
) -> AgentRequest:
    """Return a request to continue a conversation.

    Args:
        messages: The conversation.
        where: Name of the conversation's field.
        system: The system's message, if it is not among them.
        choice: The request's `tool_choice`.
        tools: The request's tools.
        kinds: See `read_choice`.
        fields: Further fields of the request.

    Raises:
        RefusedError: There is no message, the last one is the beginning of the model's answer, or the choice is wrong.
    """
    if not messages:  # those that were sent have no content
        raise refused_field(where, [], "a list with at least one message that has content")
    if messages[-1].role == "assistant":
        found = "an assistant's message at the end"
        raise refused_field(where, found, "ended by a user's message: prefill is not supported")
    may_call, must_call = read_choice(choice, tools, kinds)
    before = (ChatMessage(role="system", content=system),) if system else ()
    return AgentRequest(messages=(*before, *messages), tools=tools, may_call=may_call, must_call=must_call, **fields)


def asks_for_usage(body: Mapping[str, Json]) -> bool:
    """Return True if a stream must end with token counts."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def read_schema(form: Json, name: str, inner: str | None = None) -> Json:
    """Return the JSON schema that an answer must follow; None without one.

    Args:
        form: The format from the request.
        name: Name of the format's field.
        inner: Name of the field of the format that contains the schema; None if the format itself does.

    Raises:
        RefusedError: The format is unknown.
    """
    match {"type": "text"} if form is None else form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema"} as given:
            held = given.get(inner) if inner else given
            if isinstance(held, dict) and isinstance(held.get("schema"), dict):
                return held["schema"]
    raise refused_field(name, form, 'of type "text", "json_object", or "json_schema" with a schema')


def read_tools(
    tools: Json, named: Callable[[dict[str, Any]], Json], expected: str, *, schema: str = "parameters"
) -> Tools:
    """Return the tools in the format of chat templates.

    Args:
        tools: The request's tools.
        named: Returns the object with a tool's name, or any other value for an unsupported tool.
        expected: Description of a valid tool, for error messages.
        schema: Name of the field of a tool's parameters.

    Raises:
        RefusedError: A tool is invalid or not supported.
    """
    read: list[Mapping[str, Json]] = []
    types = {"description": (str, "a string"), schema: (dict, "an object"), "strict": (bool, "true or false")}
    for index, tool in enumerate(tools or ()):
        function = named(tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused_field(f"tools[{index}]", tool, expected)
        for name, (kind, description) in types.items():
            if function.get(name) is not None and not isinstance(function[name], kind):
                where = f"tools[{index}]{'' if function is tool else '.function'}.{name}"
                raise refused_field(where, function[name], description)
        plain = {"name": function["name"], "description": function.get("description") or ""}
        plain["parameters"] = function.get(schema) or {"type": "object"}
        read.append({"type": "function", "function": plain})
    return tuple(read)


def read_choice(choice: Json, tools: Tools, kinds: Mapping[str, str]) -> tuple[bool, Json]:
    """Return whether tools may be called, and the JSON schema of a forced call or None.

    Args:
        choice: The request's `tool_choice`: a kind, or an object with a `type` and, for one tool, its name.
        tools: The request's tools.
        kinds: "auto", "none", "required" or "named", by the API's name for it.

    Raises:
        RefusedError: The choice is unknown, or there is no such tool.
    """
    given: dict[str, Any] = choice if isinstance(choice, dict) else {"type": "auto" if choice is None else choice}
    kind = kinds.get(str(given.get("type")))
    if kind is None:
        expected = f"one of {[*kinds]}; to restrict the calls, list only those tools in `tools`"
        raise refused_field("tool_choice", given.get("type"), expected)
    if kind in ("auto", "none"):
        return kind == "auto", None
    inner = given.get("function")
    named = inner.get("name") if isinstance(inner, dict) else given.get("name")
    calls = [
        _call_schema(**tool["function"]) for tool in tools if kind == "required" or tool["function"]["name"] == named
    ]
    if not calls:
        raise refused_field("tool_choice", choice, f"one of the tools {[tool['function']['name'] for tool in tools]}")
    return True, {"anyOf": calls}


def _call_schema(*, name: str, parameters: Json, **_others: Json) -> Json:
    properties = {"name": {"const": name}, "arguments": parameters}
    return {"type": "object", "properties": properties, "required": [*properties]}


class Content(NamedTuple):
    """A message's text, and the images in it."""

    text: str
    images: tuple[MessageImage, ...] = ()

    def after(self, text: str) -> "Content":
        """Return the content with a text before it."""
        images = tuple(MessageImage(len(text) + one.at, one.digest) for one in self.images)
        return Content(text + self.text, images)


def content_of(content: Json, where: str, *, between: str = "") -> Content:
    """Return the content of a message, with its text parts joined.

    Args:
        content: A string or a list of parts; None is an empty text.
        where: Place of the content in the request.
        between: Separator between text parts.

    Raises:
        RefusedError: A part is neither text nor a kept image.
    """
    if content is None or isinstance(content, str):
        return Content(content or "")
    if not isinstance(content, list):
        raise refused_field(where, content, "a string or a list of text parts")
    texts: list[str] = []
    images: list[MessageImage] = []
    for index, part in enumerate(content):
        if isinstance(part, KeptImage):
            images.append(MessageImage(len(between.join(texts)), part.digest))
            continue
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or kind not in TEXTS:
            raise refused_field(f"{where}[{index}].type", kind, '"text": this policy supports only text')
        texts.append(text_field(part, "refusal" if kind == "refusal" else "text", f"{where}[{index}]"))
    return Content(between.join(texts), tuple(images))


def text_of(content: Json, where: str, *, between: str = "") -> str:
    """Return the text of a content that has no images, as `content_of` reads it.

    Raises:
        RefusedError: A part is not text.
    """
    text, images = content_of(content, where, between=between)
    if images:
        raise refused_field(where, "an image", "text: only messages of users and tools may have images")
    return text


def text_field(part: Mapping[str, Json], name: str, where: str) -> str:
    """Return the text in a field of a content part.

    Raises:
        RefusedError: The field is not a string.
    """
    text = part.get(name)
    if not isinstance(text, str):
        raise refused_field(f"{where}.{name}", text, "a string")
    return text


def as_object(value: Json, where: str) -> dict[str, Any]:
    """Return a value that must be an object; None is an empty one.

    Raises:
        RefusedError: The value is something else.
    """
    if not isinstance(value, dict | None):
        raise refused_field(where, value, "an object")
    return value or {}


def as_list(value: Json, where: str, expected: str) -> list[Any]:
    """Return a value that must be a list with at least one item.

    Raises:
        RefusedError: The value is not a list, or it is empty.
    """
    if not isinstance(value, list) or not value:
        raise refused_field(where, value, expected)
    return value
