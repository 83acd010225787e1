"""Read settings from their sources, and report what is wrong with them."""

import datetime
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl_core.data import encodable_json
from rl_core.errors import DataError, SettingsError
from rl_core.files import parse_toml, read_toml
from rl_core.secret_settings import redact_option, redacted_names
from rl_trainer_parts.settings.algorithm_choice import option_fields, settings_class, with_algorithm
from rl_trainer_parts.settings.fields import SettingField, describe_type, find_setting, leaves, setting_fields, short
from rl_trainer_parts.settings.other_names import renamed, value_hint
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.suggestions import suggest

ENVIRONMENT_PREFIX = "RL__"

OLD_OPTIONS = ("algorithm.advantage_options", "algorithm.policy_loss_options")
"""Settings of older versions that held the options of a function."""

Given = tuple[str, Any, str]
"""Name, value and origin of a setting."""


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
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def given(kind: type[Settings], wrong: list[str]) -> Iterator[Given]:
        yield from _from_file(file, kind)
        yield from _from_environment(environment, kind)
        yield from _from_arguments(arguments, kind, wrong)

    for name, value, _ in given(kind, []):
        if name.startswith("algorithm."):
            _put(values, name.split("."), value)
    kind, values = settings_class(with_algorithm(values), kind), {}
    for name, value, origin in given(kind, wrong):
        if encodable_json([name, value], keep_infinite=True) != [name, value]:
            wrong.append(f"{name}: must be text in UTF-8; found {value!r} ({origin}).")
        elif find_setting(name, kind) is None:
            wrong.append(_unknown(name, f" ({origin})", kind, value))
        else:
            _put(values, name.split("."), value)
            origins[name] = origin
    settings = build_settings(values, origins, kind=kind, also=wrong)
    settings.remember_file(file)
    return settings


def _from_file(file: Path | None, kind: type[Settings]) -> Iterator[Given]:
    if file is None:
        return
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
    for section, values in document.items():
        is_section = isinstance(values, dict) and (values or section in kind.model_fields)
        for key, value in values.items() if is_section else [("", values)]:
            name = f"{section}.{key}" if is_section else section
            yield name, value.isoformat() if type(value) is datetime.date else value, str(file)


def _from_environment(environment: Mapping[str, str], kind: type[Settings]) -> Iterator[Given]:
    for variable, text in sorted(environment.items()):
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield name, parse_text(name, text, kind), f"environment variable {variable}"


def _from_arguments(arguments: Sequence[str], kind: type[Settings], wrong: list[str]) -> Iterator[Given]:
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            whole = next((one for one in setting_fields(kind) if f".{one}".endswith(f".{name}")), name)
            hint = f"write --{whole}={text}" if equals else "the form of a setting is --section.name=value"
            wrong.append(f"unexpected argument {argument!r}; {hint}.")
        elif equals or (rest and not rest[0].startswith("--")):
            yield name, parse_text(name, text if equals else rest.pop(0), kind), "command line"
        elif find_setting(name, kind) is None:
            yield name, text, "command line"
        else:
            wrong.append(f"--{name} needs a value: --{name}=VALUE.")


def parse_text(name: str, text: str, kind: type[Settings] = Settings) -> Any:
    """Parse a value: TOML, "none", or the text itself."""
    setting = find_setting(name, kind)
    if setting is not None and text.lower() == "none" and setting.is_optional:
        return None
    if setting is None or setting.is_text:
        return text
    try:
        return parse_toml(f"value = {text}", where=name)["value"]
    except DataError:
        return text


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
    origins, values = origins or {}, with_algorithm(values)
    kind = settings_class(values, kind)
    wrong = [*also, *_redacted(values, origins), *_booleans_for_numbers(values, origins, kind)]
    try:
        settings = kind(**{section: {} for section in kind.model_fields} | dict(values))
    except ValidationError as error:
        wrong += dict.fromkeys(_explain(problem, origins, kind) for problem in error.errors())  # one a type of a union
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
        if setting is not None and isinstance(found, bool) and setting.is_number:
            yield setting.refusal(str(found).lower(), _origin(name, origins))


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """Where a value, or the table that contains it, comes from, in parentheses; empty if unknown."""
    while name not in origins and "." in name:
        name = name.rpartition(".")[0]
    return f" ({origins[name]})" if name in origins else ""


def _explain(problem: Mapping[str, Any], origins: Mapping[str, str], kind: type[Settings]) -> str:
    """Describe one of pydantic's errors: of a setting, or of a part of its value, such as the second of two numbers."""
    place, what = [str(part) for part in problem["loc"]], problem["type"]
    where = _origin(".".join(place), origins)
    depth = next((n for n in range(len(place), 1, -1) if find_setting(".".join(place[:n]), kind)), 1)
    name = ".".join(place[:depth])
    setting = find_setting(name, kind)
    is_named = setting is not None and typing.get_origin(setting.annotation) is dict
    item = ", ".join(place[depth : depth + 1] if is_named else place[depth:])
    if setting is None or (item and is_dataclass(setting.annotation)):
        return _unknown(".".join(place), where, kind)
    if what == "missing" and not item:
        return f"{name}: required, and not set. {setting.meaning}"
    found = _shown(problem["input"], setting)
    if bound := setting.bound(problem.get("ctx", {})):
        bounds = setting.bound(setting.limits) if bound == "finite" else bound
        optional = ", or none" if setting.is_optional else ""
        return f"{name} must be {bounds}{optional}; found {short(problem['input']) or found}{where}."
    hint = _value_hint(name, problem["input"], setting.annotation)
    if not item:
        return setting.refusal(found, where, hint)
    expected = describe_type(setting.annotation)
    if naming := {"missing": "required", "unexpected_keyword_argument": "unknown name"}.get(what):
        return f"{name}: must be {expected}; item {item}: {naming}{where}."
    return f"{name}: must be {expected}; found {_kind(problem)} in item {item}{where}.{hint}"


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


def _unknown(name: str, where: str, kind: type[Settings], value: Any = None) -> str:
    """An unknown setting, and what it may mean; one of an entry may be another of that entry."""
    if name in OLD_OPTIONS:
        with suppress(DataError):
            value = parse_toml(f"value = {value}", where=name)["value"] if isinstance(value, str) else value
        options = [*value] if isinstance(value, Mapping) else ["OPTION"]
        names = ", ".join(f"algorithm.{option}" for option in options)
        return f"{name}{where} is gone, because each option is a setting of its own. Write {names}."
    if (option := option_fields().get(name) if name.startswith("algorithm.") else None) is not None:
        of, _, _ = option.meaning.partition(".")
        return f"{name}{where} is an {of[0].lower()}{of[1:]}, which this run does not use. Choose it, or leave it out."
    table, entry = find_setting(".".join(name.split(".")[:2]), kind), ".".join(name.split(".")[2:3])
    known = [*setting_fields(kind), *(table.entry_fields(entry) if table is not None else ())]
    if kind.left_out and find_setting(name) is not None:
        return f"{name}{where} has no effect in `{kind.command}`. Leave it out."
    now = renamed(name)
    is_field = any(one.endswith(f".{name}") for one in known)
    if now != name and not is_field and (now in known or any(one.startswith(f"{now}.") for one in known)):
        return f"{name}{where} is called {now} since version 0.2. Write {now}."
    section, *_ = name.split(".")
    if name != section != renamed(section):
        where += f". [{section}] is called [{renamed(section)}] since version 0.2"
    return f"unknown setting {name!r}{where}.{suggest(name, known)} `{kind.command} --help` lists all of them."
