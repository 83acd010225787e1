"""Agent loops by name, and their options: dataclasses from tables of a TOML file."""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rl_core.errors import SettingsError
from rl_core.registry import Registry, unknown_name
from rl_core.secret_settings import REDACTED, redact_option, resolve_secrets
from rl_rollout.loops.protocol import AgentLoop

OptionsT = TypeVar("OptionsT")


MAX_FLOAT_BITS = 1023


def read_options(kind: type[OptionsT], table: Mapping[str, Any], *, where: str) -> OptionsT:
    """Build a dataclass from a table.

    Args:
        kind: A dataclass, whose fields may be dataclasses, tuples, or mappings from text to one type.
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
    missing = [
        name
        for name, field in fields.items()
        if name not in table and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SettingsError(f"{where} needs the option {missing[0]!r}.")
    return kind(**{name: _value(hints[name], value, where=f"{where}: {name}") for name, value in table.items()})


def _value(kind: Any, value: Any, *, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, value, where=where)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise SettingsError(f"{where} must be one of {', '.join(map(repr, arguments))}; found {_shown(where, value)}.")
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return read_options(typing.cast(type[Any], kind), value, where=where)
    if origin is tuple and isinstance(value, list | tuple):
        if arguments[-1] is not ... and len(value) != len(arguments):
            raise SettingsError(f"{where} must be a list of {len(arguments)}; found {_shown(where, value)}.")
        return tuple(_value(arguments[0], item, where=f"{where}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {str(key): _value(arguments[1], item, where=f"{where}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > MAX_FLOAT_BITS:
            raise SettingsError(
                f"{where} must be a number that fits into a float; found one of {value.bit_length()} bits."
            )
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(kind, type) and isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    raise SettingsError(f"{where} must be {_words(kind)}; found {_found(where, value)}.")


def _one_of(kinds: tuple[Any, ...], value: Any, *, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        try:
            return _value(kind, value, where=where)
        except SettingsError:
            if len(others) == 1:
                raise
    raise SettingsError(f"{where} must be {' or '.join(map(_words, others))}; found {_found(where, value)}.")


def _shown(where: str, value: Any) -> str:
    """Format a value for a message, without secrets."""
    for name in (*re.split(r"[.:\s]+", where), ""):
        value = redact_option(name, value)
    return repr(value)


def _found(where: str, value: Any) -> str:
    """Format a value with its type; for a secret, only the type."""
    shown, kind = _shown(where, value), type(value).__name__
    return kind if shown == repr(REDACTED) else f"{shown} ({kind})"


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return "a list"
    if typing.get_origin(kind) in (dict, Mapping) or dataclasses.is_dataclass(kind):
        return "a table"
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false", type(None): "nothing"}
    return names.get(kind) or str(getattr(kind, "__name__", kind))


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
