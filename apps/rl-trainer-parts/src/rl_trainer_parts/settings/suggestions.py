"""Suggest the setting that an unknown name means."""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

from rl_trainer_parts.settings.other_names import Meaning, meanings, misspelled, renamed

MAX_SUGGESTIONS = 3
FLAGS = ("dry-run", "replay", "resume")
"""Options of `train` that are not settings."""

OF_ASYNC = ("schedule", "roles")
"""Sections that only rl-async-trainer has."""

OWNERS = {**dict.fromkeys(OF_ASYNC, "rl-async-trainer"), "sft": "`rl-sync-trainer sft`, which has settings of its own"}
"""What has each section that others lack."""

ONLY_ASYNC = (
    "max_staleness",
    "sync_every",
    "partial_rollout",
    "max_inflight_groups",
    "validate_on",
    "validation_batch",
)
"""Settings of [schedule], which their names alone tell."""

OF_ROUTERS = ("aux_loss", "z_loss", "bias_update")
"""Parts of the names that Megatron and others give to a mixture's router losses and bias updates."""

TOGETHER = (("run", "trainer", "optimizer", "parallel"), ("rollout", "vllm", "replicas"))
"""Sections about one thing, the policy's training or its generation: a name in one may mean a setting of another."""

OF_TEACHERS = "distillation.teachers.NAME."

LIKE_SECTION = 0.7
"""Minimum similarity of a misspelled section."""

LIKE_NAME = 0.8
"""Minimum similarity of a misspelled name. Below it are other words, which a suggestion would mislead."""

MIN_LETTERS = 5
"""Shorter names without a section, such as `cp` and `type`, are no misspellings."""

MAX_EXTRA = 2
"""Maximum difference of the lengths of a name and of its misspelling."""

TITLES = {"verl": "verl", "trl": "TRL"}


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'trainer.steps' or 'rollout_cache.steps'?"; empty if nothing is similar.

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
    if section in OWNERS and not any(one.startswith(f"{section}.") for one in names):
        return f" [{section}] is a section of {OWNERS[section]}."
    if name in ONLY_ASYNC and f"schedule.{name}" not in names:
        return f" schedule.{name} is a setting of rl-async-trainer."
    if any(part in ending for part in OF_ROUTERS):
        return " The learners add no router loss and do not change the router's bias. Leave it out."
    foreign = meanings(name)
    if foreign and foreign[0].name == name:
        return _explained(foreign, name, names)
    name = renamed(name) if "." in name else name  # alone, `engine` is rollout.engine
    own = _misspelled(name, names)
    is_ours = any(
        _likeness(name, one) >= LIKE_NAME or one.endswith(f".{name}") or one.startswith(f"{name}.") for one in own
    )
    foreign = [] if is_ours else _by_its_end(name, names) if "." in name or not own else foreign
    if not own and not foreign:
        foreign = [dataclasses.replace(row, name=name) for row in misspelled(name)]
    return _explained(foreign, name, names) if foreign else _question(own[:MAX_SUGGESTIONS])


def _by_its_end(name: str, names: Sequence[str]) -> list[Meaning]:
    """What the last parts of an unknown name mean; the last part alone leads to no other section than the name's."""
    section, *_ = parts = name.split(".")
    found = meanings(".".join(parts[-2:])) if len(parts) > 1 else []
    if not found:
        found = [_of_section(row, section, names) for row in meanings(parts[-1])]
        found = [row for row in found if row.settings or _is_allowed(row.name, section, names)]
    of_section = [row for row in found if row.name.startswith(f"{section}.")]
    is_teachers = "distillation" in name or "teacher" in name
    return of_section or [row for row in found if is_teachers or not "".join(row.settings).startswith(OF_TEACHERS)]


def _of_section(row: Meaning, section: str, names: Sequence[str]) -> Meaning:
    """A meaning with those of its settings that a name of one of our sections may mean."""
    if row.name.startswith(f"{section}."):
        return row
    return dataclasses.replace(row, settings=tuple(one for one in row.settings if _is_allowed(one, section, names)))


def _is_allowed(name: str, section: str, names: Sequence[str]) -> bool:
    """Whether an unknown name of a section may mean a name: one of our own sections leads only to those about it."""
    if not any(one.startswith(f"{section}.") for one in names):
        return True
    near = next((group for group in TOGETHER if section in group), (section,))
    return name.partition(".")[0] in near


def _misspelled(name: str, names: Sequence[str]) -> list[str]:
    """Settings that a misspelled name may mean, those of the most similar section first."""
    section, _, ending = name.rpartition(".")
    allowed = [one for one in names if not section or _is_allowed(one, section.partition(".")[0], names)]
    likeness = {one: _likeness(ending, one.rpartition(".")[2]) for one in allowed}
    best = max(likeness.values(), default=0.0)
    cutoff = LIKE_NAME if section or len(name) >= MIN_LETTERS else 1.0
    found = [one for one in allowed if likeness[one] == best >= cutoff]
    if best < 1:  # the name may be a section
        found = [one for one in names if one.startswith(f"{name}.")] or found
    if not section:
        return [name.replace("_", ".", 1)] if name.replace("_", ".", 1) in names else found
    near = [one for one in found if _likeness(section, one.rpartition(".")[0]) >= LIKE_SECTION]
    own = [one for one in allowed if one.rpartition(".")[0] == section and likeness[one] >= LIKE_NAME]
    is_moved = best == 1 and section in {one.rpartition(".")[0] for one in names}
    moved = found if is_moved else []  # a right name in another of our sections
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
