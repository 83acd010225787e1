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
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from rl_core.errors import RLError, SettingsError
from rl_core.record_fields import BOUND_WORDS
from rl_core.secret_settings import redact
from rl_trainer_parts.settings.other_names import renamed
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.suggestions import suggest

ENTRY = "NAME"
"""Placeholder for the name of a table entry, such as a teacher's."""

CHANGEABLE: dict[str, tuple[str, ...]] = {
    "run": ("if_exists", "readable_by"),
    "trainer": (
        *("steps", "validate_every", "validate_first", "checkpoint_every", "keep_checkpoints"),
        *("keep_best", "target", "target.metric", "target.value", "target.stop", "target.lower_is_better"),
        *("stop_when_no_better", "background_checkpoints", "proof_tolerance"),
    ),
    "prompts": ("validation_limit", "validation_samples", "validation_temperature"),
    "reward": ("timeout_s", "max_concurrency", "max_calls_per_s", "retries", "backoff_s", "retry_on"),
    "rollout": (
        *("audit_share", "rescored_share", "placement", "offload_engine", "offload_keeps_weights"),
        *("deadline_s", "start_deadline_s"),
    ),
    "cluster": ("ray_address", "cpus_per_rank", "start_deadline_s", "call_deadline_s"),
    "vllm": ("max_num_seqs", "max_num_batched_tokens", "kv_cache_gib", "gpu_memory_utilization", "num_threads"),
    "optimizer": ("num_threads",),
    "lora": ("serving",),
    **dict.fromkeys(("metrics", "health", "rollout_cache", "replicas", "weights"), ()),
    "distillation": ("cache", "deadline_s", "start_deadline_s"),
    "distillation.teachers.NAME": (
        *("replicas", "resources.cpus", "resources.gpus", "placement", "max_model_len", "tensor"),
        *("max_batch_tokens", "num_threads", "kv_cache_gib", "gpu_memory_utilization", "sleep", "restarts"),
    ),
}
"""Settings that may differ on resume, because they do not change what is learned; without names, a whole section."""

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
        if not {setting.name, f"{section}."} & {*kind.left_out}
    }


def sections_of(kind: type[Settings]) -> list[str]:
    """Names of the sections with settings, in the order of schema.py."""
    return [*dict.fromkeys(name.partition(".")[0] for name in setting_fields(kind))]


def with_value(settings: Settings, name: str) -> str:
    """A setting of a section as errors show it: `prompts.max_tokens = 1024 (default)`."""
    value = attrgetter(name)(settings)
    is_default = value == setting_fields(type(settings))[name].default
    return f"{name} = {value}{' (default)' if is_default else ''}"


def problems_of(prefix: str, check: Callable[..., object], *values: Any, **named: Any) -> Iterator[str]:
    """The lines of a check's error, each after a prefix, such as "lora."; none if the check passes."""
    try:
        check(*values, **named)
    except RLError as error:
        yield from (f"{prefix}{line}" for line in str(error).splitlines())


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


@functools.cache
def changeable_on_resume(kind: type[Settings]) -> frozenset[str]:
    """Names of the settings that may differ on resume."""
    changeable = {*kind.also_changeable_on_resume}
    for section, names in CHANGEABLE.items():
        changeable |= {f"{section}.{name}" for name in names}
        changeable |= {name for name in setting_fields(kind) if not names and name.startswith(f"{section}.")}
    return frozenset(changeable)


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
            limits=limits_of(marked[entry.name]),
        )
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from fields_of(hints[entry.name], f"{prefix}.{entry.name}")


def limits_of(annotation: Any) -> dict[str, float]:
    """The bounds in an annotation, such as `Annotated[int, Ge(1)]`, which may be optional."""
    marks = [mark for part in (annotation, *typing.get_args(annotation)) for mark in getattr(part, "__metadata__", ())]
    single = [one for mark in marks for one in getattr(mark, "metadata", (mark,))]
    return {key: getattr(one, key) for one in single for key in BOUND_WORDS if hasattr(one, key)}


def attribute_meanings(kind: Any, heading: str = "Attributes") -> dict[str, str]:
    """The text of each entry in a Google docstring's `Attributes:`, or below another heading."""
    section = (inspect.getdoc(kind) or "").partition(f"{heading}:\n")[2].partition("\n\n")[0]
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


def help_text(
    usage: str, kind: type[Settings] = Settings, *, topic: str = "", options: Mapping[str, SettingField] | None = None
) -> str:
    """The usage, and every setting with its type, default and meaning.

    Args:
        usage: The command's usage.
        kind: The trainer's settings class.
        topic: A section or setting to explain alone.
        options: Settings that depend on others, such as the options of advantages.

    Raises:
        SettingsError: The section or setting does not exist.
    """
    known, sections = {**setting_fields(kind), **(options or {})}, sections_of(kind)
    if topic in sections:
        below = (field for name, field in (options or {}).items() if name.startswith(f"{topic}."))
        return "\n".join((*_section_lines(topic, kind), *(line for one in below for line in _entry_lines(one, kind))))
    if topic:
        endings = [one for name, one in known.items() if name == topic or name.endswith(f".{topic}")]
        if not endings:
            hint = suggest(renamed(topic), [*sections, *known])
            raise SettingsError(f"{topic!r} is neither a section nor a setting.{hint} Sections: {', '.join(sections)}.")
        return "\n".join(line for one in endings for line in _entry_lines(one, kind))
    explained = f"Sections, each explained by `{kind.command} --help SECTION`: {', '.join(sections)}."
    lines = [usage, "", kind.notes, "", textwrap.fill(explained)]
    for section in sections:
        lines.extend(("", *_section_lines(section, kind)))
    return "\n".join(lines)


def _section_lines(section: str, kind: type[Settings]) -> Iterator[str]:
    meaning = inspect.getdoc(kind.model_fields[section].annotation) or ""
    yield f"[{section}]  {meaning.partition(chr(10))[0]}"
    for setting in setting_fields(kind).values():
        if setting.name.startswith(f"{section}."):
            yield from _entry_lines(setting, kind)


def _entry_lines(setting: SettingField, kind: type[Settings]) -> Iterator[str]:
    width = min(shutil.get_terminal_size().columns, 110) - 2 * len(INDENT)
    for field in (setting, *setting.entry_fields().values()):
        default = "required" if field.default is dataclasses.MISSING else f"default {written(field.default)}"
        resume = "may differ on resume" if field.name in changeable_on_resume(kind) else ""
        about = "; ".join(filter(None, (field.bound(field.limits), default, resume)))
        yield f"  --{field.name}={describe_type(field.annotation)}  ({about})"
        words = textwrap.wrap(field.meaning, width, break_on_hyphens=False)
        yield from (f"{INDENT}{line}" for line in words)


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


def plain_settings(settings: Settings, *, has_none: bool = True) -> dict[str, Any]:
    """Settings as nested dicts of plain values that may be written and shown: literal secrets are redacted.

    Args:
        settings: The run's settings.
        has_none: Include the settings whose value is none, which TOML cannot express.
    """
    values, known = redact(settings.model_dump(mode="json", exclude_none=not has_none)), setting_fields(type(settings))
    return {
        section: {name: value for name, value in values[section].items() if f"{section}.{name}" in known}
        for section in sections_of(type(settings))
    }
