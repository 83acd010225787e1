"""What settings of verl, TRL and older versions are called here; `other_libraries/names.toml` is the table."""

import dataclasses
import functools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, Literal

from rl_core.files import parse_toml

LISTS = {"verl": "verl-0.9.1.txt", "trl": "trl-1.16.0.txt"}
"""Every setting of a library, one a line, in a file that carries its version."""

MAX_MEANINGS = 2
"""A short name that may mean more than this, such as "name", says nothing."""


MIN_LETTERS = 6
"""A name with fewer letters is too near to other words for a guess at a misspelling."""

OF_OTHER_ENGINES = ("*.reward_model.*", "reward_model.*", "distillation.teacher_model*.inference.*")
"""Rows of sections that repeat the names of the policy's engine; alone, such a name means the policy's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a name of another library means here.

    Attributes:
        library: "verl" or "trl".
        name: The library's name; it may be a pattern with *.
        kind: "settings": there are such settings; "refused": there are none, for a reason; "without": nothing like it.
        settings: Our settings, or an option of `train`, such as "--resume".
        note: What differs, or the reason; may be empty.
    """

    library: str
    name: str
    kind: Literal["settings", "refused", "without"]
    settings: tuple[str, ...] = ()
    note: str = ""


def renamed(name: str) -> str:
    """Today's name of a setting or section that had another one before; the name itself if it had none."""
    older, (section, _, key) = _document()["older"], name.partition(".")
    field, _, rest = key.partition(".")
    if new := older.get(f"{section}.{field}"):
        return f"{new}.{rest}".rstrip(".")
    return f"{older[section]}.{key}".rstrip(".") if section in older else name


@functools.cache
def listed_names(library: str) -> tuple[str, ...]:
    """Every setting of a library, in the order of its own files: the policy's come before the critic's."""
    return tuple(_asset(LISTS[library]).split())


@functools.cache
def full_names(library: str) -> tuple[str, ...]:
    """The listed names, and those that only the table has."""
    rows = (row.name for row in table() if row.library == library and "*" not in row.name)
    return tuple(dict.fromkeys((*listed_names(library), *rows)))


@functools.cache
def table() -> tuple[Meaning, ...]:
    """Every row of the table."""
    rows = []
    for library in LISTS:
        for kind, texts in _document()[library].items():
            for name, text in texts.items():
                ours, _, note = text.partition(": ") if kind == "settings" else ("", "", text)
                settings = tuple(setting.strip() for setting in ours.split(",") if setting)
                rows.append(Meaning(library=library, name=name, kind=kind, settings=settings, note=note))
    return tuple(rows)


def meaning_of(name: str, library: str) -> Meaning | None:
    """The longest row that matches a full name; a counterpart or a reason comes before the lack of one."""
    rows = [row for row in table() if row.library == library and fnmatchcase(name, row.name)]
    return max(rows, key=lambda row: (row.kind != "without", len(row.name)), default=None)


def meanings(name: str) -> list[Meaning]:
    """What a name may mean: a full name, or the end of one, such as "optim.lr".

    A full name means one thing. The end of several names may mean two settings, or have one reason, which must be about
    the name itself and not about its section. Any other end means nothing.
    """
    for library in LISTS:
        is_full = name in full_names(library) or _is_filled_in(name, library)
        if is_full and (meaning := meaning_of(name, library)):
            return [dataclasses.replace(meaning, name=name)]
    found_by: dict[tuple[str, ...], Meaning] = {}
    for library, full in _ending_with(name):
        row = meaning_of(full, library)
        if row is not None and row.name not in OF_OTHER_ENGINES:
            is_named = row.name.rpartition(".")[2] != "*" and fnmatchcase(name, f"*{row.name.rpartition('.')[2]}")
            found_by.setdefault(row.settings or (row.note,) * is_named, dataclasses.replace(row, name=full))
    found = list(found_by.values())
    if any(not row.settings for row in found):
        return found if len(found) == 1 and () not in found_by else []
    return found if len(found) <= MAX_MEANINGS else []


def misspelled(name: str) -> list[Meaning]:
    """What a name with one wrong letter means, in the same section or without one; empty if it has no counterpart."""
    section, _, ending = name.rpartition(".")
    if len(ending) < MIN_LETTERS:
        return []
    every = [one.rpartition(".") for library in LISTS for one in full_names(library)]
    near = {last for where, _, last in every if section in ("", where) and _is_one_edit(ending, last)}
    found = meanings(f"{section}.{near.pop()}".removeprefix(".")) if len(near) == 1 else []
    return [row for row in found if row.settings]


def _is_one_edit(name: str, other: str) -> bool:
    """Whether one letter is missing, added or wrong, or two neighbours have changed places."""
    pairs = enumerate(zip(name, other, strict=False))
    start = next((place for place, (left, right) in pairs if left != right), min(len(name), len(other)))
    one, two = name[start:], other[start:]
    is_swapped = one[:2] == two[1::-1] and one[2:] == two[2:]
    return name != other and (is_swapped or two[1:] in (one, one[1:]) or one[1:] == two)


def value_hint(setting: str, value: str) -> str:
    """A hint for verl's value of one of our settings; empty if the table has no such value."""
    ours = _document()["values"].get(setting, {}).get(value)
    if ours is None:
        return ""
    if ours.endswith("."):
        return f" {ours}"
    return f" Did you mean {ours!r}, verl's {value!r}?" if ours else f" verl's {value!r} is missing here."


@functools.cache
def _document() -> dict[str, Any]:
    return parse_toml(_asset("names.toml"), where="names.toml")


def _is_filled_in(name: str, library: str) -> bool:
    """Whether a row such as distillation.teacher_model*.model_path names the setting itself, and not only a section."""
    ending = f".{name.rpartition('.')[2]}"
    rows = (row.name for row in table() if row.library == library and row.name.endswith(ending))
    return any(fnmatchcase(name, row) for row in rows if not row.startswith("*."))


def _ending_with(name: str) -> Iterator[tuple[str, str]]:
    """Libraries and full names that end with a name."""
    return ((library, full) for library in LISTS for full in full_names(library) if full.endswith(f".{name}"))


def _asset(name: str) -> str:
    return files("rl_trainer_parts.settings").joinpath("other_libraries", name).read_text("utf-8")
