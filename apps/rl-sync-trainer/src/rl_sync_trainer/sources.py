"""Where settings come from, how they are explained, and what is said when they are wrong."""

import dataclasses
import difflib
import inspect
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl_core.errors import SettingsError
from rl_sync_trainer.settings import Settings

ENVIRONMENT_PREFIX = "RL__"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting, as help and error messages speak of it.

    Attributes:
        name: Such as "trainer.steps".
        annotation: Its type.
        default: Its default, or dataclasses.MISSING.
        meaning: Its words in the section's docstring.
    """

    name: str
    annotation: Any
    default: Any
    meaning: str

    @property
    def is_text(self) -> bool:
        """True when the value is taken as it is written."""
        kind = typing.get_origin(self.annotation)
        if kind in (dict, tuple):
            return False
        options = typing.get_args(self.annotation) or (self.annotation,)
        return any(option in (str, Path) for option in options) or kind is typing.Literal


def setting_fields() -> dict[str, SettingField]:
    """Every setting by name, in the order of settings.py."""
    return {setting.name: setting for setting in _walk()}


def _walk() -> Iterator[SettingField]:
    for section, model_field in Settings.model_fields.items():
        kind: Any = model_field.annotation
        meanings = attribute_meanings(kind)
        hints = typing.get_type_hints(kind)
        for entry in dataclasses.fields(kind):
            yield SettingField(
                name=f"{section}.{entry.name}",
                annotation=hints[entry.name],
                default=entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory(),
                meaning=meanings.get(entry.name, ""),
            )


def attribute_meanings(kind: type) -> dict[str, str]:
    """The words after each name of a Google docstring's `Attributes:`."""
    text = inspect.getdoc(kind) or ""
    section = text.partition("Attributes:\n")[2]
    meanings: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        match = re.match(r"    (\w+): (.*)", line)
        if match:
            name = match[1]
            meanings[name] = match[2]
        elif line.strip() and name:
            meanings[name] += " " + line.strip()
    return meanings


def load_settings(
    file: Path | None, arguments: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Settings:
    """Read settings from a file, the environment and the command line.

    Args:
        file: TOML file, or None.
        arguments: `--section.name=value` or `--section.name value`.
        environment: Variables; those that begin with RL__ are read.

    Raises:
        SettingsError: A name is unknown or a value is wrong; all of them are listed.
    """
    merged: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for origin, values in (
        (str(file), _from_file(file)),
        ("environment", _from_environment(environment)),
        ("command line", _from_arguments(arguments)),
    ):
        for name, value in values.items():
            _check_name(name, origin)
            section, _, key = name.partition(".")
            merged.setdefault(section, {})[key] = value
            origins[name] = origin
    return build_settings(merged, origins)


def build_settings(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Settings:
    """Validate nested values.

    Raises:
        SettingsError: Something is missing or has the wrong type; all of it is listed.
    """
    _refuse_booleans_for_numbers(values, origins or {})
    try:
        return Settings(**values)
    except ValidationError as error:
        lines = [_explain(problem, origins or {}) for problem in error.errors()]
        raise SettingsError("\n".join(lines)) from None


def _refuse_booleans_for_numbers(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Python counts true as 1, and pydantic with it; who wrote it meant something else."""
    for name, setting in setting_fields().items():
        section, _, key = name.partition(".")
        fields = values.get(section)
        found = fields.get(key) if isinstance(fields, Mapping) else None
        kinds = {setting.annotation, *typing.get_args(setting.annotation)}
        if isinstance(found, bool) and kinds & {int, float} and bool not in kinds:
            where = f" ({origins[name]})" if name in origins else ""
            expected = describe_type(setting.annotation)
            raise SettingsError(f"{name}: must be {expected}; found {str(found).lower()}{where}. {setting.meaning}")


def _explain(problem: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    name = ".".join(str(part) for part in problem["loc"][:2])
    is_whole = len(problem["loc"]) <= 2  # deeper is a part of a value, such as the second of two numbers
    if (problem["type"] == "missing" and is_whole) or "." not in name:
        missing = [s for s in setting_fields().values() if s.name == name or s.name.startswith(f"{name}.")]
        required = [s.name for s in missing if s.default is dataclasses.MISSING]
        return (
            f"{' and '.join(required) or name}: required, and not set. {missing[0].meaning if missing else ''}".rstrip()
        )
    where = f" ({origins[name]})" if name in origins else ""
    if not is_whole:
        expected = describe_type(setting_fields()[name].annotation)
        return f"{name}: must be {expected}; item {problem['loc'][2]}: {problem['msg'].lower()}{where}."
    return f"{name}: {problem['msg'].lower()}; found {problem['input']!r}{where}. {setting_fields()[name].meaning}"


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise SettingsError(f"settings file {file} does not exist (looked in {Path.cwd()}).") from None
    except OSError as error:
        raise SettingsError(f"settings file {file} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {file} is not TOML: {error}.") from None
    flat: dict[str, Any] = {}
    for section, values in document.items():
        if not isinstance(values, dict):
            _check_name(section, str(file))
        else:
            flat.update({f"{section}.{key}": value for key, value in values.items()})
    return flat


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for variable, text in sorted(environment.items()):
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _check_name(name, f"environment variable {variable}")
            found[name] = parse_text(name, text)
    return found


def _from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise SettingsError(f"unexpected argument {argument!r}; settings are written --section.name=value.")
        name, equals, text = argument[2:].partition("=")
        _check_name(name, "command line")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise SettingsError(f"--{name} needs a value: --{name}=VALUE.")
            text = rest.pop(0)
        found[name] = parse_text(name, text)
    return found


def parse_text(name: str, text: str) -> Any:
    """The value that a text stands for: TOML, "none", or the text itself."""
    setting = setting_fields()[name]
    if text.lower() == "none" and type(None) in typing.get_args(setting.annotation):
        return None
    if setting.is_text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _check_name(name: str, origin: str) -> None:
    known = setting_fields()
    if name in known:
        return
    endings = {full.partition(".")[2]: full for full in reversed(known)}  # the first section wins
    candidates = [endings[name]] if name in endings else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not candidates:
        candidates = [endings[match] for match in difflib.get_close_matches(name.rpartition(".")[2], endings, n=1)]
    hint = f" Did you mean {candidates[0]!r}?" if candidates else ""
    raise SettingsError(f"unknown setting {name!r} ({origin}).{hint} `train --help` lists all of them.")


def describe_type(annotation: Any) -> str:
    """A type in a user's words."""
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return " | ".join(describe_type(part) for part in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return "[" + ", ".join(describe_type(part) for part in typing.get_args(annotation)) + "]"
    if typing.get_origin(annotation) is list:
        return f"[{describe_type(typing.get_args(annotation)[0])}, ...]"
    if typing.get_origin(annotation) is dict:
        return "{name = value}"
    names = {type(None): "none", Path: "path", str: "text", float: "number", int: "integer", bool: "true | false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))
