"""JSON schemas from Python signatures, using pydantic."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError, SettingsError

MAX_SHOWN_FAULTS = 5


class Signature:
    """The parameters of a function: their JSON schema, and the conversion of JSON arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read a function's signature and docstring.

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

        self.description, meanings = read_docstring(function)
        name = getattr(function, "__name__", type(function).__name__)
        fields: dict[str, Any] = {}
        for index, parameter in enumerate(_parameters(function, name=name)):
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            details = pydantic.Field(default, alias=parameter.name, description=meanings.get(parameter.name))
            fields[f"argument_{index}"] = (parameter.annotation, details)  # an alias may have any name
        try:
            self._model: Any = pydantic.create_model(
                name, __config__=pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
            )
            schema = self._model.model_json_schema(schema_generator=Untitled)
        except (pydantic.PydanticUserError, pydantic.PydanticSchemaGenerationError) as error:
            raise SettingsError(
                f"tool {name!r}: its parameters cannot be represented as JSON ({_first_line(error)}). Use str, int, "
                "float, bool, list, dict, Literal, dataclasses, or unions of these."
            ) from error
        self._error: type[Exception] = pydantic.ValidationError
        schema.pop("title", None)
        schema.pop("description", None)  # a model's docstring, not the function's
        self.schema: dict[str, Json] = schema

    def bind(self, arguments: Mapping[str, Json]) -> dict[str, Any]:
        """Convert JSON arguments to Python arguments.

        Raises:
            DataError: Arguments are missing, unknown, or of another type. The message names each.
        """
        try:
            bound = self._model.model_validate(dict(arguments))
        except self._error as error:
            faults = [_fault(problem) for problem in error.errors(include_url=False)]  # type: ignore[attr-defined]
            more = f"; and {len(faults) - MAX_SHOWN_FAULTS} more" if len(faults) > MAX_SHOWN_FAULTS else ""
            raise DataError("; ".join(faults[:MAX_SHOWN_FAULTS]) + more) from None
        return {field.alias: getattr(bound, name) for name, field in self._model.model_fields.items()}


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
    shown = repr(problem["input"])
    return f"{place!r}: {problem['msg']}; found {shown if len(shown) <= 80 else shown[:77] + '...'}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
