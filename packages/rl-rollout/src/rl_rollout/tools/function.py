"""Tools that are Python functions, with JSON schemas from their signatures, using pydantic."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, overload

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_rollout.rewards.outputs import preview
from rl_rollout.tools.protocol import TextAndImages, result_of
from rl_rollout.user_code import BlockingCalls

MAX_SHOWN_FAULTS = 5


def read_signature(
    function: Callable[..., Any], meanings: Mapping[str, str], *, name: str
) -> tuple[Any, dict[str, Json]]:
    """Return a pydantic model of a function's parameters, and its JSON schema.

    Args:
        function: The function.
        meanings: Description of each parameter.
        name: Name of the function.

    Raises:
        SettingsError: The function has *args, **kwargs or positional-only parameters, or a parameter without a type
            or with one that JSON cannot represent.
        MissingExtraError: pydantic is not installed.
    """
    try:
        import pydantic
        import pydantic.json_schema
    except ImportError as error:
        raise MissingExtraError("@tool needs pydantic. Install rl-rollout[tools] as the README says.") from error

    class Untitled(pydantic.json_schema.GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - the name is pydantic's
            return False

    fields: dict[str, Any] = {}
    for index, parameter in enumerate(_parameters(function, name=name)):
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        details = pydantic.Field(default, alias=parameter.name, description=meanings.get(parameter.name))
        fields[f"argument_{index}"] = (parameter.annotation, details)  # an alias may have any name
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        model: Any = pydantic.create_model(name, __config__=config, **fields)
        schema = model.model_json_schema(schema_generator=Untitled)
    except (pydantic.PydanticUserError, pydantic.PydanticSchemaGenerationError) as error:
        reason = str(error).partition("\n")[0]
        raise SettingsError(
            f"tool {name!r}: its parameters cannot be represented as JSON ({reason}). Use str, int, float, bool, list, "
            "dict, Literal, dataclasses, or unions of these."
        ) from error
    schema.pop("title", None)
    schema.pop("description", None)  # a model's docstring, not the function's
    return model, schema


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the text before the first section of a Google docstring, and the description of each argument."""
    text = inspect.getdoc(function) or ""
    sections = re.split(r"^(Args|Returns|Raises|Yields|Examples?|Attributes|Notes?):[ \t]*$", text, flags=re.MULTILINE)
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    meanings: dict[str, str] = {}
    name = ""
    for line in bodies.get("Args", "").splitlines():
        found = re.match(r"(?: {2,4}|\t)(\*{0,2}\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if found:
            name = found[1]
            meanings[name] = found[2]
        elif line.strip() and name:
            meanings[name] += f" {line.strip()}"
    return re.sub(r"(?<!\n)\n(?!\n)", " ", sections[0].strip()), meanings


def _parameters(function: Callable[..., Any], *, name: str) -> list[inspect.Parameter]:
    signature = inspect.signature(function)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise SettingsError(f"tool {name!r}: a type in its signature cannot be resolved ({error}).") from error
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise SettingsError(
                f"tool {name!r}: parameter {str(parameter)!r} cannot be passed by name. Use plain parameters."
            )
        if parameter.name not in hints:
            raise SettingsError(
                f"tool {name!r}: parameter {parameter.name!r} has no type. Add one, such as `{parameter.name}: str`; "
                "it becomes part of the schema that the model reads."
            )
        parameters.append(parameter.replace(annotation=hints[parameter.name]))
    return parameters


def _fault(problem: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{place!r} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{place!r} is not an argument of this tool"
    return f"{place!r}: {problem['msg']}; found {preview(problem['input'])}"


class FunctionTool:
    """A function that a model can call. Create it with `tool`.

    Attributes:
        name: Name for the model.
        description: Purpose of the tool, for the model.
        parameters: JSON schema of the arguments.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> None:
        """Read the function's signature and docstring.

        Raises:
            SettingsError: Its parameters cannot be represented as JSON.
            MissingExtraError: pydantic is not installed.
        """
        if not callable(function):
            raise SettingsError(f"a tool must be a function; found {type(function).__name__}.")
        own_name = str(getattr(function, "__name__", type(function).__name__))
        purpose, meanings = read_docstring(function)
        self._function = function
        self._model, schema = read_signature(function, meanings, name=own_name)
        self.name = name or own_name
        self.description = description or purpose
        self.parameters: Mapping[str, Json] = schema
        self._is_async = inspect.iscoroutinefunction(function)
        self._blocking = BlockingCalls()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function directly."""
        return self._function(*args, **kwargs)

    async def call(self, arguments: Mapping[str, Json]) -> str | TextAndImages:
        """Run one call, as `Tool.call` does. A plain `def` runs in a thread, which is abandoned on cancellation.

        Raises:
            DataError: The arguments do not fit the signature.
            ToolError: Too many earlier calls still run, or the function returned something that must be awaited.
        """
        bound = self._bind(arguments)
        if self._is_async:
            return result_of(await self._function(**bound))
        value, error = await self._blocking.run(lambda: self._function(**bound))
        if error is not None:
            raise error
        return result_of(value)

    def close(self) -> None:
        """Stop the idle threads."""
        self._blocking.close()

    def _bind(self, arguments: Mapping[str, Json]) -> dict[str, Any]:
        """Convert JSON arguments to Python arguments.

        Raises:
            DataError: Arguments are missing, unknown, or of another type. The message names each.
        """
        import pydantic

        try:
            bound = self._model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            faults = [_fault(problem) for problem in error.errors(include_url=False)]
            more = f"; and {len(faults) - MAX_SHOWN_FAULTS} more" if len(faults) > MAX_SHOWN_FAULTS else ""
            raise DataError("; ".join(faults[:MAX_SHOWN_FAULTS]) + more) from None
        return {field.alias: getattr(bound, name) for name, field in self._model.model_fields.items()}


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, description: str | None = None
) -> Any:
    """Create a tool from a `def` or an `async def`. Use it as `@tool` or `@tool(name="...")`.

    The schema comes from the signature: str, int, float, bool, list, dict, Literal, dataclasses, unions, defaults. The
    description is the docstring before its first section; `Args:` describes each parameter. A text result goes to the
    model unchanged, any other result as JSON. A list of a message's parts, `{"type": "text", "text": ...}` and
    `{"type": "image", "image": b"..."}`, goes to a model that takes images as its text and images.

    Args:
        function: The function. A `def` runs in a thread, so it may block.
        name: Name for the model; by default, the function's own.
        description: Replaces the docstring's.

    Raises:
        SettingsError: A parameter has no type, or one that JSON cannot represent.
        MissingExtraError: pydantic is not installed.
    """
    if function is not None:
        return FunctionTool(function, name=name, description=description)
    return lambda given: FunctionTool(given, name=name, description=description)
