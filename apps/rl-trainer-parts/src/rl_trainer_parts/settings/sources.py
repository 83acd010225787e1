"""Read settings from their sources, and report what is wrong with them."""

import dataclasses
import datetime
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl_core.data import encodable_json
from rl_core.errors import DataError, SettingsError
from rl_core.files import parse_toml, read_toml
from rl_core.secret_settings import redact_option, redacted_names
from rl_trainer_parts.settings.fields import SettingField, describe_type, find_setting, leaves, setting_fields
from rl_trainer_parts.settings.other_names import value_hint
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.suggestions import suggest

ENVIRONMENT_PREFIX = "RL__"


def load_settings(
    file: Path | None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    *,
    kind: type[Settings] = Settings,
) -> Settings:
    """Read settings from a file, the environment and the command line.

    Args:
        file: TOML file, or None.
        arguments: `--section.name=value` or `--section.name value`.
        environment: Environment variables; those that start with RL__ are read.
        kind: The trainer's settings class.

    Raises:
        SettingsError: A name is unknown or a value is wrong; all problems are listed.
    """
    wrong: list[str] = []
    merged: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for origin, values in (
        (str(file), _from_file(file, kind, wrong)),
        ("environment", _from_environment(environment, kind, wrong)),
        ("command line", _from_arguments(arguments, kind, wrong)),
    ):
        for name, given in values.items():
            value = given.isoformat() if type(given) is datetime.date else given  # TOML has dates
            if encodable_json([name, value], keep_infinite=True) != [name, value]:
                wrong.append(f"{name}: must be text in UTF-8; found {value!r} ({origin}).")
            elif _is_known(name, origin, kind, wrong):
                _put(merged, name.split("."), value)
                origins[name] = origin
    settings = build_settings(merged, origins, kind=kind, also=wrong)
    settings.remember_file(file)
    return settings


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value in nested tables, which are copied, so that tables of other sources do not change."""
    for key in path[:-1]:
        below = values.get(key)
        values[key] = dict(below) if isinstance(below, Mapping) else {}
        values = values[key]
    values[path[-1]] = value


def build_settings(
    values: Mapping[str, Any],
    origins: Mapping[str, str] | None = None,
    *,
    kind: type[Settings] = Settings,
    also: Sequence[str] = (),
) -> Settings:
    """Validate nested values.

    Args:
        values: Values by section and name.
        origins: Where each value comes from, by full name.
        kind: The trainer's settings class.
        also: Further problems, in words.

    Raises:
        SettingsError: A setting is missing or has the wrong type; all problems are listed.
    """
    origins = origins or {}
    wrong = [*also, *_redacted(values, origins), *_booleans_for_numbers(values, origins, kind)]
    try:
        settings = kind(**values)
    except ValidationError as error:
        wrong += [_explain(problem, origins, kind) for problem in error.errors()]
    if wrong:
        raise SettingsError("\n".join(wrong))
    return settings


def _redacted(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """Problems of redacted secrets: a run's own settings.toml has none, so the user must provide them again."""
    for name in redacted_names(values):
        yield (
            f"{name}: the secret is redacted in this file{_origin(name.partition('[')[0], origins)}. Use the settings "
            'that the run was started with, or refer to an environment variable, such as "$NAME".'
        )


def _booleans_for_numbers(values: Mapping[str, Any], origins: Mapping[str, str], kind: type[Settings]) -> Iterator[str]:
    """Problems of true and false as numbers, which Python and pydantic accept as 1 and 0."""
    for name, found in leaves(values):
        setting = find_setting(name, kind)
        kinds = {setting.annotation, *typing.get_args(setting.annotation)} if setting is not None else set()
        if setting is not None and isinstance(found, bool) and kinds & {int, float} and bool not in kinds:
            expected = describe_type(setting.annotation)
            where = _origin(name, origins)
            yield f"{name}: must be {expected}; found {str(found).lower()}{where}. {setting.meaning}"


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """Where a value, or the table that contains it, comes from, in parentheses; empty if unknown."""
    while name not in origins and "." in name:
        name = name.rpartition(".")[0]
    return f" ({origins[name]})" if name in origins else ""


PART_TYPES = {"float": "a number", "int": "an integer", "bool": "true or false", "string": "text"}
"""What a part of a table must be, by the beginning of pydantic's type of error."""


def _explain(problem: Mapping[str, Any], origins: Mapping[str, str], kind: type[Settings]) -> str:
    place = [str(part) for part in problem["loc"]]
    known = setting_fields(kind)
    table = known.get(".".join(place[:2]))
    if table is not None and table.entry_kind is not None and len(place) > 3:
        return _explain_entry(problem, place, table, origins)
    name = ".".join(place[:2])
    is_whole = len(place) <= 2  # deeper is a part of a value, such as the second of two numbers
    if (problem["type"] == "missing" and is_whole) or "." not in name:
        missing = [s for s in known.values() if s.name == name or s.name.startswith(f"{name}.")]
        required = [s.name for s in missing if s.default is dataclasses.MISSING]
        return (
            f"{' and '.join(required) or name}: required, and not set. {missing[0].meaning if missing else ''}".rstrip()
        )
    where = _origin(name, origins)
    expected, found = describe_type(known[name].annotation), _shown(problem["input"], known[name])
    hint = _value_hint(name, problem["input"], known[name].annotation)
    if not is_whole:
        item, naming = ", ".join(place[2:]), {"missing": "required", "unexpected_keyword_argument": "unknown name"}
        if problem["type"] in naming:
            return f"{name}: must be {expected}; item {item}: {naming[problem['type']]}{where}."
        if problem["type"].startswith("dataclass_"):
            return f"{name}: must be {expected}; item {item} must be {{name = value}}; found {found}{where}."
        wanted = PART_TYPES.get(problem["type"].partition("_")[0])
        if expected == "{name = value}" and wanted:
            return f"{name}: {item} must be {wanted}; found {_kind(problem)}{where}."
        return f"{name}: must be {expected}; found {_kind(problem)} in item {item}{where}.{hint}"
    return f"{name}: must be {expected}; found {found}{where}.{hint} {known[name].meaning}"


def _kind(problem: Mapping[str, Any]) -> str:
    """A part of a value that must be one of some words, or else its type, because the part may be secret."""
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        return repr(problem["input"])
    return describe_type(type(problem["input"]))


def _value_hint(name: str, value: Any, annotation: Any) -> str:
    """What to write instead of a value: verl's, one in capitals, or one without the brackets of a list."""
    options, text = typing.get_args(annotation), str(value).lower() if isinstance(value, bool) else value
    if not isinstance(text, str):
        return ""
    if hint := value_hint(name, text):
        return hint
    is_list = typing.get_origin(annotation) is tuple and options[-1] is ...
    if is_list and text in typing.get_args(options[0]):
        return f' Write ["{text}"].'
    return f" Did you mean {text.lower()!r}?" if text.lower() in options else ""


def _shown(value: Any, setting: SettingField) -> str:
    """A value for an error message; text in place of a table is not shown, because any part may be secret."""
    if isinstance(value, str) and not setting.is_text and any(mark in value for mark in "{=["):
        return f"text of {len(value)} characters that is not TOML (TOML uses = where JSON uses a colon)"
    return repr(redact_option(setting.name.rpartition(".")[2], value))


def _explain_entry(
    problem: Mapping[str, Any], place: Sequence[str], table: SettingField, origins: Mapping[str, str]
) -> str:
    """Describe an error in a setting of a table entry."""
    name, known = ".".join(place), table.entry_fields(place[2])
    where = _origin(name, origins)
    if problem["type"] == "unexpected_keyword_argument":
        return f"unknown setting {name!r}{where}.{suggest(name, known)} `train --help` lists all of them."
    setting = known.get(name) or known[".".join(place[:4])]
    if problem["type"] == "missing":
        return f"{name}: required, and not set. {setting.meaning}"
    expected = describe_type(setting.annotation)
    if setting.name != name:
        return f"{setting.name}: must be {expected}; found {_kind(problem)} in item {place[-1]}{where}."
    return f"{name}: must be {expected}; found {problem['input']!r}{where}. {setting.meaning}"


def _from_file(file: Path | None, kind: type[Settings], wrong: list[str]) -> dict[str, Any]:
    if file is None:
        return {}
    if not os.path.lexists(file):
        raise SettingsError(f"settings file {file} does not exist (looked in {Path.cwd()}).")
    if file.is_dir() and (file / "settings.toml").is_file():
        raise SettingsError(
            f"settings file {file} must be a file; found a folder. Did you mean {file / 'settings.toml'}?"
        )
    try:
        document = read_toml(file)
    except DataError as error:
        raise SettingsError(f"settings file {error}") from None
    flat: dict[str, Any] = {}
    for section, values in document.items():
        if not isinstance(values, dict):
            _is_known(section, str(file), kind, wrong)
        else:
            flat.update({f"{section}.{key}": value for key, value in values.items()})
    return flat


def _from_environment(environment: Mapping[str, str], kind: type[Settings], wrong: list[str]) -> dict[str, Any]:
    found = {}
    for variable, text in sorted(environment.items()):
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            if _is_known(name, f"environment variable {variable}", kind, wrong):
                found[name] = parse_text(name, text, kind)
    return found


def _from_arguments(arguments: Sequence[str], kind: type[Settings], wrong: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            hint = _written_out(argument, kind) if "=" in argument else "the form of a setting is --section.name=value"
            wrong.append(f"unexpected argument {argument!r}; {hint}.")
            continue
        name, equals, text = argument[2:].partition("=")
        is_known = _is_known(name, "command line", kind, wrong)
        has_value = bool(equals) or (bool(rest) and not rest[0].startswith("--"))
        if has_value and not equals:
            text = rest.pop(0)
        if is_known and has_value:
            found[name] = parse_text(name, text, kind)
        elif is_known:
            wrong.append(f"--{name} needs a value: --{name}=VALUE.")
    return found


def _written_out(argument: str, kind: type[Settings]) -> str:
    """How to write `steps=4`: with the section of the first setting with this name."""
    name, _, value = argument.partition("=")
    known = setting_fields(kind)
    whole = name if name in known else next((one for one in known if one.rpartition(".")[2] == name), name)
    return f"write --{whole}={value}"


def parse_text(name: str, text: str, kind: type[Settings] = Settings) -> Any:
    """Parse a value: TOML, "none", or the text itself."""
    setting = find_setting(name, kind)
    if setting is None:
        return text
    if text.lower() == "none" and type(None) in typing.get_args(setting.annotation):
        return None
    if setting.is_text:
        return text
    try:
        return parse_toml(f"value = {text}", where=name)["value"]
    except DataError:
        return text


def _entry_of(name: str, kind: type[Settings]) -> dict[str, SettingField]:
    """Settings of the entry in a name: for `distillation.teachers.large.modle`, those of teacher large."""
    section, key, entry, *_ = [*name.split(".", 3), "", "", ""]
    table = setting_fields(kind).get(f"{section}.{key}")
    return {} if table is None else table.entry_fields(entry)


def _is_known(name: str, origin: str, kind: type[Settings], wrong: list[str]) -> bool:
    """True if the setting exists; otherwise the problem is added to `wrong`."""
    if find_setting(name, kind) is not None:
        return True
    known = {**setting_fields(kind), **_entry_of(name, kind)}
    wrong.append(f"unknown setting {name!r} ({origin}).{suggest(name, known)} `train --help` lists all of them.")
    return False
