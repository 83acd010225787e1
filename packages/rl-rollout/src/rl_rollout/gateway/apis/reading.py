"""Reads the fields that requests of all APIs have in common."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from rl_core.data import Json
from rl_rollout.gateway.asks import MAX_CHOICES
from rl_rollout.gateway.refusals import RefusedError, refused_field

Tools = tuple[Mapping[str, Any], ...]
NOTHING: Mapping[str, tuple[Json, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Values of fields that ask for nothing; any other value is refused."""
TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
"""Kinds of parts of a content that are text."""


def check_fields(body: Mapping[str, Json], known: Collection[str]) -> None:
    """Refuse the first field that is not known, unless it asks for nothing.

    Raises:
        RefusedError: Names it.
    """
    for name, value in body.items():
        if value is not None and name not in known and value not in NOTHING.get(name, ()):
            raise RefusedError(
                f"this server cannot honour {name}. Leave it out.", param=name, code="unsupported_parameter"
            )


def read_num_choices(body: Mapping[str, Json]) -> int:
    """How many answers are asked for.

    Raises:
        RefusedError: Too many, or none.
    """
    number = body.get("n") or 1
    if not isinstance(number, int) or not 1 <= number <= MAX_CHOICES:
        raise refused_field("n", number, f"an integer from 1 to {MAX_CHOICES}")
    return number


def asks_for_usage(body: Mapping[str, Json]) -> bool:
    """Whether a stream is to end with the number of tokens.

    Raises:
        RefusedError: The options of the stream are none.
    """
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise refused_field("stream_options", options, "an object")
    return bool(options.get("include_usage"))


def read_schema(form: Json, name: str, inner: str | None = None) -> Json:
    """The JSON schema that an answer must follow; None where there is none.

    Args:
        form: What the request says of it.
        name: Of its field.
        inner: Field of it that holds the schema, where it is not its own.

    Raises:
        RefusedError: It is no format that there is.
    """
    match form or {"type": "text"}:
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
    body: Mapping[str, Json], found: Callable[[dict[str, Any]], Json], expected: str, *, schema: str = "parameters"
) -> Tools:
    """Tools as chat templates take them.

    Args:
        body: The request.
        found: The object with the name of a tool; anything else where it is none that can be served.
        expected: What a tool must be, in words.
        schema: Field of its parameters.

    Raises:
        RefusedError: One is none.
    """
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise refused_field("tools", tools, "a list of tools")
    read: list[Mapping[str, Json]] = []
    for index, tool in enumerate(tools):
        one = found(tool) if isinstance(tool, dict) else None
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise refused_field(f"tools[{index}]", tool, expected)
        function = {"name": one["name"], "description": one.get("description") or ""}
        parameters = one.get(schema) or {"type": "object"}
        read.append({"type": "function", "function": {**function, "parameters": parameters}})
    return tuple(read)


def read_choice(choice: Json, tools: Tools, kinds: Mapping[str, str]) -> tuple[bool, Json]:
    """Whether tools may be called; and the JSON schema of the call that must be made, None where none must.

    Args:
        choice: What the request says of it: a kind, or an object with a `type` and, for one tool, its name.
        tools: Of the request.
        kinds: "auto", "none", "required" or "named", by the API's word.

    Raises:
        RefusedError: It is none of these, or there is no tool to call.
    """
    given: dict[str, Any] = choice if isinstance(choice, dict) else {"type": choice or "auto"}
    kind = kinds.get(str(given.get("type")))
    if kind is None:
        raise refused_field("tool_choice", choice, f"one of {[*kinds]}")
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


def text_of(content: Json, where: str, *, between: str = "") -> str:
    """The text of a message's content, its parts joined.

    Args:
        content: A text, or parts; None is no text.
        where: Its place in the request.
        between: What joins parts.

    Raises:
        RefusedError: A part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refused_field(where, content, "a text or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or kind not in TEXTS:
            raise refused_field(f"{where}[{index}].type", kind, '"text": this policy reads and writes text alone')
        texts.append(text_field(part, "refusal" if kind == "refusal" else "text", f"{where}[{index}]"))
    return between.join(texts)


def text_field(part: Mapping[str, Json], name: str, where: str) -> str:
    """The text in a field of a part.

    Raises:
        RefusedError: It is none.
    """
    text = part.get(name)
    if not isinstance(text, str):
        raise refused_field(f"{where}.{name}", text, "a text")
    return text


def as_list(value: Json, where: str, expected: str) -> list[Any]:
    """A list that is not empty.

    Raises:
        RefusedError: It is none.
    """
    if not isinstance(value, list) or not value:
        raise refused_field(where, value, expected)
    return value
