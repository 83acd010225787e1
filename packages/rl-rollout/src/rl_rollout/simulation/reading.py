"""Workloads from TOML: those that ship, and a user's own."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rl_core.errors import SettingsError
from rl_rollout.simulation.workload import Workload

BUILT_IN = "qwen2.5-math-7b-dapo"
SHIPPED = files("rl_rollout.simulation") / "workloads"


def built_in_workload(name: str = BUILT_IN) -> Workload:
    """The workload of this name that ships."""
    return parse_workload((SHIPPED / f"{name}.toml").read_text(encoding="utf-8"), where=f"{name}.toml")


def read_workload(file: Path) -> Workload:
    """A user's workload.

    Raises:
        SettingsError: The file cannot be read, is no TOML, or says something that cannot be.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the workload {file} cannot be read: {error}.") from error
    return parse_workload(text, where=str(file))


def parse_workload(text: str, *, where: str) -> Workload:
    """A workload from TOML.

    Raises:
        SettingsError: It is no TOML, or says something that cannot be.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{where} is no TOML: {error}.") from error
    try:
        found: Workload = _build(Workload, table, "")
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from error
    return found


def _build(kind: type[Any], table: Mapping[str, Any], path: str) -> Any:
    known = {item.name: item for item in fields(kind)}
    hints = get_type_hints(kind)
    section = path or "the workload"
    for name in table:
        if name not in known:
            raise SettingsError(f"{section} has an unknown key {name!r}; known: {', '.join(known)}.")
    for name, item in known.items():
        if name not in table and item.default is MISSING and item.default_factory is MISSING:
            raise SettingsError(f"{section} lacks {name!r}.")
    return kind(**{name: _value(hints[name], value, f"{path}.{name}".strip(".")) for name, value in table.items()})


def _value(kind: Any, value: Any, path: str) -> Any:
    """A value of a field's type; a whole number is also a real one."""
    if get_origin(kind) in (Union, UnionType):
        return _value(next(one for one in get_args(kind) if one is not type(None)), value, path)
    if get_origin(kind) is tuple:
        is_pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
        if not is_pairs or not all(_is_number(number) for pair in value for number in pair):
            raise SettingsError(f"{path} must be a list of pairs of numbers; found {value!r}.")
        return tuple((pair[0], pair[1]) for pair in value)
    if hasattr(kind, "__dataclass_fields__"):
        if not isinstance(value, dict):
            raise SettingsError(f"{path} must be a table; found {value!r}.")
        return _build(kind, value, path)
    fits = _is_number(value) if kind is float else type(value) is kind
    if not fits:
        raise SettingsError(f"{path} must be of type {kind.__name__}; found {value!r}.")
    return kind(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
