"""Every setting by name, with type, default and meaning, for error messages and `--help`."""

import dataclasses
import functools
import inspect
import math
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.record_fields import BOUND_WORDS
from rl_core.secret_settings import redact
from rl_trainer_parts.settings.changeable import CHANGEABLE_BY_SECTION
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.suggestions import suggest

ENTRY = "NAME"
"""Placeholder for the name of a table entry, such as a teacher's."""

ORIGINS = """Settings come from the command line, then environment variables (RL__TRAINER__STEPS=20), then the file.
Relative paths start at the current folder. Exit status: 0 finished; 1 failed; 2 a mistake in settings or files;
3 paused by health.pause_on; 130 or 143 stopped by Ctrl-C or SIGTERM. Pausing and stopping save a checkpoint; a second
signal ends the run at once."""

INDENT = " " * 8


WORDS = {type(None): "none", Path: "path", str: "text", float: "number", int: "integer", bool: "true | false"}
"""Types in a user's words."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting, for help and error messages.

    Attributes:
        name: Full name, such as "trainer.steps".
        annotation: Type.
        default: Default value, or dataclasses.MISSING.
        meaning: Description in the section's docstring.
        limits: Bounds by their name in `BOUND_WORDS`.
    """

    name: str
    annotation: Any
    default: Any
    meaning: str
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def _options(self) -> tuple[Any, ...]:
        """The types of a single value; empty if the value has parts."""
        if typing.get_origin(self.annotation) in (dict, list, tuple, Mapping):
            return ()
        return typing.get_args(self.annotation) or (self.annotation,)

    @property
    def is_text(self) -> bool:
        """True if the value is used as written."""
        return typing.get_origin(self.annotation) is typing.Literal or bool({str, Path} & {*self._options})

    @property
    def is_number(self) -> bool:
        """True if the value is a number, and not true or false."""
        return bool({int, float} & {*self._options}) and bool not in self._options

    @property
    def is_optional(self) -> bool:
        """True if the value may be none."""
        return type(None) in self._options

    @property
    def entry_kind(self) -> type | None:
        """The dataclass of an entry, if the value is a table of named entries."""
        if typing.get_origin(self.annotation) is not dict:
            return None
        kind: Any = typing.get_args(self.annotation)[1]
        return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None

    def entry_fields(self, entry: str = ENTRY) -> dict[str, "SettingField"]:
        """Settings of an entry by name; empty if there are no entries."""
        kind = self.entry_kind
        return {} if kind is None else {one.name: one for one in fields_of(kind, f"{self.name}.{entry}")}

    def bound(self, limits: Mapping[str, Any]) -> str:
        """Bounds in words, such as "above 0 and at most 1" or "finite"; other keys have no words."""
        if "min_length" in limits:
            return f"of length {limits['min_length']} or more"
        known = {key: limit for key, limit in limits.items() if key in BOUND_WORDS and limit != -math.inf}
        if "gt" in known and int in self._options:
            known = {"ge": known.pop("gt") + 1} | known
        if known.keys() == {"ge", "le"}:
            return f"from {short(known['ge'])} to {short(known['le'])}"
        words = (
            f"{BOUND_WORDS[key]} {short(limit)}" if limit != math.inf else "finite" for key, limit in known.items()
        )
        return " and ".join(words)

    def refusal(self, found: object, where: str, hint: str = "") -> str:
        """The message for a value of another type."""
        return f"{self.name}: must be {describe_type(self.annotation)}; found {found}{where}.{hint} {self.meaning}"


@functools.cache
def setting_fields(kind: type[Settings] = Settings) -> Mapping[str, SettingField]:
    """Every setting by name, in the order of schema.py; settings of table entries are in `entry_fields`."""
    return {
        setting.name: setting
        for section, model_field in kind.model_fields.items()
        for setting in fields_of(model_field.annotation, section)
    }


def with_value(settings: Settings, name: str) -> str:
    """A setting of a section as errors show it: `prompts.max_tokens = 1024 (default)`."""
    value = attrgetter(name)(settings)
    is_default = value == setting_fields(type(settings))[name].default
    return f"{name} = {value}{' (default)' if is_default else ''}"


def find_setting(name: str, kind: type[Settings] = Settings) -> SettingField | None:
    """A setting, including one of a table entry: `distillation.teachers.large.replicas`."""
    known = setting_fields(kind)
    if name in known:
        return known[name]
    section, key, entry, *rest = [*name.split(".", 3), "", ""]
    table = known.get(f"{section}.{key}")
    if table is None or table.entry_kind is None or not entry:
        return None
    if not rest[0]:
        return SettingField(
            name=name, annotation=table.entry_kind, default=dataclasses.MISSING, meaning=f"An entry of {table.name}."
        )
    return table.entry_fields(entry).get(name)


def changeable_on_resume(kind: type[Settings]) -> frozenset[str]:
    """Names of the settings that may differ on resume."""
    names = (f"{section}.{name}" for section, names in CHANGEABLE_BY_SECTION.items() for name in names)
    return frozenset((*names, *kind.also_changeable_on_resume))


def fields_of(kind: Any, prefix: str) -> Iterator[SettingField]:
    """Settings of a dataclass and of nested dataclasses."""
    meanings = attribute_meanings(kind)
    hints, marked = typing.get_type_hints(kind), typing.get_type_hints(kind, include_extras=True)
    for entry in dataclasses.fields(kind):
        factory = entry.default_factory
        yield SettingField(
            name=f"{prefix}.{entry.name}",
            annotation=hints[entry.name],
            default=entry.default if factory is dataclasses.MISSING else factory(),
            meaning=meanings.get(entry.name, ""),
            limits=_limits(marked[entry.name]),
        )
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from fields_of(hints[entry.name], f"{prefix}.{entry.name}")


def _limits(annotation: Any) -> dict[str, float]:
    """The bounds in an annotation, such as `Annotated[int, Field(ge=1)]`, which may be optional."""
    marks = [mark for part in (annotation, *typing.get_args(annotation)) for mark in getattr(part, "__metadata__", ())]
    single = [one for mark in marks for one in getattr(mark, "metadata", (mark,))]
    return {key: getattr(one, key) for one in single for key in BOUND_WORDS if hasattr(one, key)}


def attribute_meanings(kind: type) -> dict[str, str]:
    """The text of each entry in a Google docstring's `Attributes:`."""
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a table, by full name."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def describe_type(annotation: Any) -> str:
    """A type in a user's words."""
    kind, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    parts = ["..." if part is ... else describe_type(part) for part in arguments]
    if kind in (typing.Literal, typing.Union, types.UnionType):
        return " | ".join(parts)
    if kind in (tuple, list):
        return f"[{', '.join([*parts, '...'] if kind is list else parts)}]"
    if kind in (dict, Mapping):
        is_open = arguments[1] is Any or dataclasses.is_dataclass(arguments[1])
        return f"{{name = {'value' if is_open else parts[1]}}}"
    if dataclasses.is_dataclass(annotation):
        return "{name = value}"
    return WORDS.get(annotation, str(getattr(annotation, "__name__", annotation)))


def help_text(usage: str, kind: type[Settings] = Settings, *, topic: str = "") -> str:
    """The usage, and every setting with its type, default and meaning.

    Args:
        usage: The command's usage.
        kind: The trainer's settings class.
        topic: A section or setting to explain alone.

    Raises:
        SettingsError: The section or setting does not exist.
    """
    known = setting_fields(kind)
    if topic in kind.model_fields:
        return "\n".join(_section_lines(topic, kind))
    if topic:
        endings = [one for name, one in known.items() if name == topic or name.endswith(f".{topic}")]
        if not endings:
            hint = suggest(topic, [*kind.model_fields, *known])
            raise SettingsError(
                f"{topic!r} is neither a section nor a setting.{hint} Sections: {', '.join(kind.model_fields)}."
            )
        return "\n".join(line for one in endings for line in _entry_lines(one, kind))
    sections = textwrap.fill(f"Sections, each explained by `train --help SECTION`: {', '.join(kind.model_fields)}.")
    lines = [usage, "", ORIGINS, "", sections]
    for section in kind.model_fields:
        lines.extend(("", *_section_lines(section, kind)))
    return "\n".join(lines)


def _section_lines(section: str, kind: type[Settings]) -> Iterator[str]:
    meaning = inspect.getdoc(kind.model_fields[section].annotation) or ""
    yield f"[{section}]  {meaning.partition(chr(10))[0]}"
    for setting in setting_fields(kind).values():
        if setting.name.startswith(f"{section}."):
            yield from _entry_lines(setting, kind)


def _entry_lines(setting: SettingField, kind: type[Settings]) -> Iterator[str]:
    changeable = changeable_on_resume(kind)
    for one in (setting, *setting.entry_fields().values()):
        yield from _explained(one, may_differ=one.name in changeable)


def _explained(setting: SettingField, *, may_differ: bool) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 110)
    is_required = setting.default is dataclasses.MISSING
    default = "required" if is_required else f"default {written(setting.default)}"
    about = "; ".join(filter(None, (setting.bound(setting.limits), default, "may differ on resume" * may_differ)))
    words = textwrap.wrap(
        setting.meaning, width - 8, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
    )
    return [f"  --{setting.name}={describe_type(setting.annotation)}  ({about})", *words]


def short(value: object) -> str:
    """A number for a message; 1e9 and 1.0 are written as integers."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def written(value: object) -> str:
    """A default as a user writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value):
        return "{}"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Settings as nested dicts of plain values that may be written and shown: literal secrets are redacted."""
    values = redact(settings.model_dump(mode="json"))
    return {section: dict(fields) for section, fields in values.items()}
