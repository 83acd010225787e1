"""Agent loops by name, and their options: dataclasses from tables of a TOML file."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rl_core.errors import SettingsError
from rl_core.record_fields import fit_options
from rl_core.registry import Registry, unknown_name
from rl_core.secret_settings import resolve_secrets
from rl_rollout.loops.protocol import AgentLoop

OptionsT = TypeVar("OptionsT")
TABLES = (dict, Mapping)


def read_options(kind: type[OptionsT], table: Mapping[str, Any], *, where: str) -> OptionsT:
    """Build a dataclass from a table.

    Args:
        kind: A dataclass, whose fields may be dataclasses, tuples of them, mappings from text to them, and unions.
        table: The table as read from TOML.
        where: Owner of the options, for messages, such as "agent loop 'tools'".

    Raises:
        SettingsError: A name is unknown or missing, or a value has another type.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in fields:
            raise SettingsError(unknown_name(f"option of {where}", str(name), fields))
    for name, option in fields.items():
        is_required = option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING
        if is_required and name not in table:
            raise SettingsError(f"{where} needs the option {name!r}.")
    built = {name: _with_records(hints[name], value, where=f"{where}: {name}") for name, value in table.items()}
    return kind(**fit_options(kind, built, owner=where))


def _with_records(kind: Any, value: Any, *, where: str) -> Any:
    """Build the dataclasses inside a value. All else is left to the rule of the value's field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _with_records_of_one(arguments, value, where=where)
    if dataclasses.is_dataclass(kind):
        if isinstance(value, typing.cast(type[Any], kind)):
            return value
        if not isinstance(value, Mapping):
            raise SettingsError(f"{where} must be a table; found {type(value).__name__}.")
        return read_options(typing.cast(type[Any], kind), value, where=where)
    if origin is tuple and isinstance(value, list | tuple):
        return [_with_records(arguments[0], item, where=f"{where}[{index}]") for index, item in enumerate(value)]
    if origin in TABLES and isinstance(value, Mapping):
        return {key: _with_records(arguments[1], item, where=f"{where}.{key}") for key, item in value.items()}
    return value


def _with_records_of_one(kinds: Sequence[Any], value: Any, *, where: str) -> Any:
    """Build the dataclasses inside a value of the first kind that it fits. If it fits none, the last one says why."""
    fitting: list[Any] = []
    if isinstance(value, Mapping):
        fitting = [kind for kind in kinds if dataclasses.is_dataclass(kind) or typing.get_origin(kind) in TABLES]
    elif isinstance(value, list | tuple):
        fitting = [kind for kind in kinds if typing.get_origin(kind) is tuple]
    for kind in fitting[:-1]:
        with suppress(SettingsError):
            return _with_records(kind, value, where=where)
    return _with_records(fitting[-1], value, where=where) if fitting else value


LOOPS: Registry[type[AgentLoop]] = Registry(
    "agent loop",
    {
        "single_turn": "rl_rollout.loops.single_turn:SingleTurnLoop",
        "tools": "rl_rollout.loops.tools:ToolsLoop",
        "environment": "rl_rollout.loops.environment:EnvironmentLoop",
        "agent": "rl_rollout.loops.agent:AgentsLoop",
        "verifiers": "rl_rollout.loops.verifiers:VerifiersLoop",
    },
    group="rl_rollout.loops",
)


def resolve_loop(name: str, options: Mapping[str, Any] | None = None) -> AgentLoop:
    """Create the agent loop with this name.

    Args:
        name: A built-in loop, or one that a package registers.
        options: A table for the loop's `Options`, a dataclass that is passed to it. A loop without `Options` accepts
            none. Secrets such as `headers` and `env` may refer to environment variables, "$NAME".

    Raises:
        SettingsError: The loop does not exist, is not a class with `run_group`, or refuses the options.
    """
    loop_class: Any = LOOPS.get(name)
    if not isinstance(loop_class, type) or not callable(getattr(loop_class, "run_group", None)):
        raise SettingsError(f"agent loop {name!r} must be a class with an async `run_group`; found {loop_class!r}.")
    options_class = getattr(loop_class, "Options", None)
    if options_class is None:
        if options:
            raise SettingsError(f"agent loop {name!r} has no options; found {', '.join(map(str, options))}.")
        bare: AgentLoop = loop_class()
        return bare
    if not (isinstance(options_class, type) and dataclasses.is_dataclass(options_class)):
        raise SettingsError(f"agent loop {name!r}: its Options must be a dataclass; found {options_class!r}.")
    resolved = resolve_secrets(options or {}, where=f"options of agent loop {name!r}")
    table = read_options(options_class, resolved, where=f"agent loop {name!r}")
    loop: AgentLoop = loop_class(table)
    return loop
