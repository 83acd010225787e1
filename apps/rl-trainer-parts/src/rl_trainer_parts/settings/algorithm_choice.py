"""The settings of a chosen algorithm: its paper's values, and the options of its advantage and its policy loss.

`[algorithm]` has a field for each option, with the type, bounds, default and meaning that the function declares. The
class is therefore made for each choice; functions of other packages bring their options in the same way.
"""

import contextlib
import dataclasses
import functools
import inspect
import typing
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from rl_core.errors import SettingsError
from rl_distill import ALGORITHMS, Algorithm
from rl_trainer_parts.settings.fields import SettingField, attribute_meanings, limits_of, setting_fields
from rl_trainer_parts.settings.schema import AlgorithmSettings, Settings

OF_ADVANTAGE, OF_LOSS = ("advantage",), ("policy_loss", "clip_low", "clip_high")
OF_KL = ("kl_coefficient", "kl_in", "kl_estimator")
FIXED = tuple(field.name for field in dataclasses.fields(AlgorithmSettings))


def with_algorithm(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, with those of `algorithm.name` where none are given.

    What belongs to a part is left out if another part is given: a clip range of another policy loss, options of another
    advantage, or the estimator of a KL that is turned off.
    """
    given = values.get("algorithm", {})
    algorithm = _named(given.get("name")) if isinstance(given, Mapping) else None
    if algorithm is None:
        return dict(values)
    parts = [("aggregation", "old_logprobs"), *([OF_KL] if given.get("kl_coefficient") != 0 else [])]
    parts += [part for part in (OF_ADVANTAGE, OF_LOSS) if given.get(part[0]) in (None, getattr(algorithm, part[0]))]
    of_paper = {name: getattr(algorithm, name) for part in parts for name in part}
    options = option_types(*(of_paper.get(part, given.get(part)) for part in ("advantage", "policy_loss")))
    kept = {name for name, one in options.items() if one.part in of_paper}
    of_paper |= {name: value for name, value in algorithm.options.items() if name in kept}
    filled = {"algorithm": {**of_paper, **given}}
    if algorithm.filter:
        filled["dynamic_sampling"] = {"filter": algorithm.filter, **values.get("dynamic_sampling", {})}
    return {**values, **filled}


def _named(name: Any) -> Algorithm | None:
    """An algorithm by name; None if there is none, which a check reports."""
    found = ALGORITHMS.get(name) if name in ALGORITHMS.names() else None
    if not isinstance(found, Algorithm | None):
        raise SettingsError(f"algorithm {name!r} of another package must be an rl_distill.Algorithm; found {found!r}.")
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionType:
    """An option of an advantage or a policy loss.

    Attributes:
        part: "advantage" or "policy_loss".
        owner: Name of the function.
        annotation: Its type, with bounds.
        default: Its default, or `dataclasses.MISSING`.
        meaning: What its function's docstring says about it.
    """

    part: str
    owner: str
    annotation: Any
    default: Any
    meaning: str


def option_types(advantage: Any, policy_loss: Any) -> dict[str, OptionType]:
    """The options of two functions by name; empty for an unknown one, which a check reports.

    Raises:
        SettingsError: The functions share an option, or one has the name of a setting.
    """
    from rl_distill.objectives import ADVANTAGES, POLICY_LOSSES  # imports torch, which `--help` does not need

    found: dict[str, OptionType] = {}
    for part, name, registry in (("advantage", advantage, ADVANTAGES), ("policy_loss", policy_loss, POLICY_LOSSES)):
        if name not in registry.names():
            continue
        for option, kind in _declared(part, name, registry.get(name)):
            if option in found or option in FIXED:
                other = f"advantage {advantage!r}" if option in found else "a setting of [algorithm]"
                raise SettingsError(
                    f"{part} {name!r} has an option {option!r}, and so has {other}. Rename it in the package that "
                    "defines it."
                )
            found[option] = kind
    return found


def _declared(part: str, name: str, function: Any) -> Iterator[tuple[str, OptionType]]:
    from rl_distill.objectives import declared_options, selection_of

    for one in filter(None, (function, selection_of(function))):
        called = one.func if isinstance(one, functools.partial) else one
        called = called if inspect.isroutine(called) else type(called).__call__
        hints, meanings = typing.get_type_hints(called, include_extras=True), attribute_meanings(called, "Args")
        for option, parameter in declared_options(one).items():
            if part == "advantage" or option not in OF_LOSS:
                default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
                annotation, meaning = hints.get(option, Any), meanings.get(option, "")
                yield option, OptionType(part=part, owner=name, annotation=annotation, default=default, meaning=meaning)


def settings_class(values: Mapping[str, Any], kind: type[Settings]) -> type[Settings]:
    """The trainer's settings class with a field for each option of the chosen advantage and policy loss.

    Without a name and options it is the trainer's own class, because types of options need an import of torch.
    """
    kind, given = getattr(kind, "__made_from__", kind), values.get("algorithm", {})
    if not isinstance(given, Mapping) or (given.get("name") is None and given.keys() <= {*FIXED}):
        return kind
    chosen = (given.get(name, getattr(AlgorithmSettings(), name)) for name in ("advantage", "policy_loss"))
    return _class_of(kind, *map(str, chosen))


@functools.cache
def _class_of(kind: type[Settings], advantage: str, policy_loss: str) -> type[Settings]:
    algorithm = _algorithm_class(advantage, policy_loss)
    fields = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__made_from__": kind,
        "__annotations__": {"algorithm": algorithm},
        "__reduce__": lambda made: (_settings, (kind, advantage, policy_loss, made.__getstate__())),
    }
    return type(kind.__name__, (kind,), fields)


@functools.cache
def _algorithm_class(advantage: str, policy_loss: str) -> type[AlgorithmSettings]:
    options = option_types(advantage, policy_loss)
    lines = "".join(f"    {name}: {one.meaning}\n" for name, one in options.items())
    made: type[AlgorithmSettings] = dataclasses.make_dataclass(
        "AlgorithmSettings",
        [(name, one.annotation, dataclasses.field(default=one.default)) for name, one in options.items()],
        bases=(AlgorithmSettings,),
        namespace={
            "__doc__": f"{(AlgorithmSettings.__doc__ or '').rstrip()}\n    {lines}",
            "__module__": AlgorithmSettings.__module__,
            "__reduce__": lambda one: (_algorithm, (advantage, policy_loss, dataclasses.asdict(one))),
        },
        frozen=True,
        kw_only=True,
    )
    return made


def _algorithm(advantage: str, policy_loss: str, values: Mapping[str, Any]) -> AlgorithmSettings:
    """Unpickle settings of an algorithm."""
    return _algorithm_class(advantage, policy_loss)(**values)


def _settings(kind: type[Settings], advantage: str, policy_loss: str, state: Any) -> Settings:
    """Unpickle settings."""
    made = _class_of(kind, advantage, policy_loss)
    settings = made.__new__(made)
    settings.__setstate__(state)
    return settings


def options_of(algorithm: AlgorithmSettings, part: str) -> dict[str, Any]:
    """Options of the chosen advantage or policy loss by name.

    Args:
        algorithm: The settings.
        part: "advantage" or "policy_loss".
    """
    options = option_types(algorithm.advantage, algorithm.policy_loss)
    return {
        name: getattr(algorithm, name) for name, one in options.items() if one.part == part and hasattr(algorithm, name)
    }


def option_defaults(kind: type[Settings]) -> dict[str, Any]:
    """Default of each option that is a setting of a class, by full name; a run without options has none of them."""
    common = setting_fields(getattr(kind, "__made_from__", kind))
    return {name: field.default for name, field in setting_fields(kind).items() if name not in common}


def changes_of_paper(settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those of the named algorithm: (value, the paper's value) by name.

    Values that follow from another difference, such as the clip range of another policy loss, are left out.
    """
    algorithm, paper = settings.algorithm, _named(settings.algorithm.name)
    if paper is None:
        return {}
    of_paper = dict.fromkeys(("dynamic_sampling.filter",), paper.filter) | {
        f"algorithm.{name}": getattr(paper, name)
        for name in ("advantage", *OF_LOSS, "aggregation", *OF_KL, "old_logprobs")
    }
    options = option_types(algorithm.advantage, algorithm.policy_loss)
    same = {part for part in ("advantage", "policy_loss") if getattr(algorithm, part) == getattr(paper, part)}
    of_paper |= {
        f"algorithm.{name}": paper.options.get(name, one.default) for name, one in options.items() if one.part in same
    }
    followed = [*(() if "policy_loss" in same else OF_LOSS[1:])]
    followed += () if algorithm.kl_coefficient and paper.kl_coefficient else OF_KL[1:]
    found = {name: (attrgetter(name)(settings), value) for name, value in of_paper.items()}
    hidden = {f"algorithm.{name}" for name in followed}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1] and name not in hidden}


@functools.cache
def option_fields() -> dict[str, SettingField]:
    """Every option of the advantages and policy losses here, by its full name, for `--help` and for errors."""
    from rl_distill.objectives import ADVANTAGES, POLICY_LOSSES

    found: dict[str, SettingField] = {}
    owners: dict[str, list[str]] = {}
    for advantage, policy_loss in (
        *((name, "") for name in ADVANTAGES.names()),
        *(("", name) for name in POLICY_LOSSES.names()),
    ):
        options: dict[str, OptionType] = {}
        with contextlib.suppress(SettingsError):  # of a package that cannot be imported, which a run may not need
            options = option_types(advantage, policy_loss)
        for option, one in options.items():
            name = f"algorithm.{option}"
            owners.setdefault(name, []).append(f"{one.part.replace('_', ' ')} {one.owner}")
            hint = typing.get_type_hints(dataclasses.make_dataclass("Option", [(option, one.annotation)]))[option]
            meaning = f"Option of {', '.join(owners[name])}. {one.meaning}"
            found[name] = SettingField(
                name=name, annotation=hint, default=one.default, meaning=meaning, limits=limits_of(one.annotation)
            )
    return found
