"""Suggest the setting that an unknown name means."""

import difflib
from collections.abc import Iterable, Sequence

from rl_trainer_parts.settings.other_names import Meaning, meanings

MAX_SUGGESTIONS = 3
FLAGS = ("dry-run", "replay", "resume")
"""Options of `train` that are not settings."""

OF_ASYNC = ("schedule", "roles")
"""Sections that only rl-async-trainer has."""

OF_ROUTERS = ("aux_loss", "z_loss", "bias_update")
"""Parts of the names that Megatron and others give to a mixture's router losses and bias updates."""

LIKE_SECTION = 0.7
"""Minimum similarity of a misspelled section."""

LIKE_NAME = 0.8
"""Minimum similarity of a misspelled name. Below it are other words, which a suggestion would mislead."""

MAX_EXTRA = 2
"""Maximum difference of the lengths of a name and of its misspelling."""

TITLES = {"verl": "verl", "trl": "TRL"}


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'trainer.steps' or 'skip.steps'?"; empty if nothing is similar.

    Only misspellings of our own names are compared by similarity. Names of verl and TRL come from a table, which
    also says what is missing here, and why.

    Args:
        name: The unknown name.
        known: Names of all settings, in the order of use.
    """
    names = list(known)
    flags = difflib.get_close_matches(name, FLAGS, n=1, cutoff=LIKE_NAME)
    name = name.lstrip("+~")  # Hydra's
    name = name if "." in name else name.replace("-", "_")  # as TRL's command line allows
    section, _, ending = name.rpartition(".")
    if flags:
        return f" Did you mean --{flags[0]}?"
    if section in OF_ASYNC and not any(one.startswith(f"{section}.") for one in names):
        return f" [{section}] is a section of rl-async-trainer."
    if any(part in ending for part in OF_ROUTERS):
        return " The learners add no router loss and do not change the router's bias. Leave it out."
    foreign = meanings(name)
    if foreign and foreign[0].name == name:
        return _explained(foreign, name, names)
    own = _misspelled(name, names)
    is_ours = any(_likeness(name, one) >= LIKE_NAME or one.endswith(f".{name}") for one in own)
    foreign = (foreign if not is_ours else []) or ([] if own else _by_its_end(name))
    return _explained(foreign, name, names) if foreign else _question(own[:MAX_SUGGESTIONS])


def _by_its_end(name: str) -> list[Meaning]:
    """What the last parts of an unknown name mean, first for those of the same section, such as the critic's."""
    section, *_ = parts = name.split(".")
    found = meanings(".".join(parts[-2:])) or meanings(parts[-1])
    return [row for row in found if row.name.startswith(f"{section}.")] or found


def _misspelled(name: str, names: Sequence[str]) -> list[str]:
    """Settings that a misspelled name may mean, those of the most similar section first."""
    section, _, ending = name.rpartition(".")
    likeness = {one: _likeness(ending, one.rpartition(".")[2]) for one in names}
    sections = {one.rpartition(".")[0] for one in names}
    best = max(likeness.values(), default=0.0)
    found = [one for one in names if likeness[one] == best >= LIKE_NAME]
    if best < 1:  # the name may be a section
        found = [one for one in names if one.startswith(f"{name}.")] or found
    if not section:
        return found
    near = [one for one in found if _likeness(section, one.rpartition(".")[0]) >= LIKE_SECTION]
    own = [one for one in names if one.rpartition(".")[0] == section and likeness[one] >= LIKE_NAME]
    moved = found if best == 1 and section in sections else []  # a right name in another of our sections
    found = near or [*sorted(own, key=lambda one: -likeness[one]), *(one for one in moved if one not in own)]
    return sorted(found, key=lambda one: -_likeness(section, one.rpartition(".")[0]))  # stable: the most used first


def _explained(found: Sequence[Meaning], name: str, names: Sequence[str]) -> str:
    """What another library's name means here."""
    first = found[0]
    if not first.settings:
        title = TITLES[first.library]
        missing = f" {title}'s {first.name!r} has no counterpart here." if first.kind == "without" else ""
        return f"{missing} {first.note}".rstrip()
    settings = list(dict.fromkeys(_filled_in(one, name) for row in found for one in row.settings))
    note = first.note if len(found) == 1 else ""
    if settings[0].partition(".")[0] in OF_ASYNC and settings[0] not in names:
        return f" In rl-async-trainer, {settings[0]} does this{f' ({note})' if note else ''}."
    return _question(settings, note)


def _filled_in(setting: str, name: str) -> str:
    """A teacher's setting with the name of the teacher, if the unknown name has one."""
    _, teachers, rest = name.partition("distillation.teachers.")
    return setting.replace("NAME", rest.partition(".")[0]) if teachers else setting


def _question(found: Sequence[str], note: str = "") -> str:
    shown = [one if one.startswith("--") else repr(one) for one in found]
    last = shown.pop() if shown else ""
    words = f" ({note})" if note else ""
    return f" Did you mean {', '.join(shown)}{' or ' if shown else ''}{last}{words}?" if last else ""


def _likeness(name: str, other: str) -> float:
    """Similarity from 0 to 1; names of quite different lengths have none."""
    if abs(len(name) - len(other)) > MAX_EXTRA:
        return 0.0
    return difflib.SequenceMatcher(None, name, other).ratio()
