"""Rules for options, declared in their annotations; invalid values raise errors that name the option.

A rule is part of the annotation of a function's keyword option or a dataclass's field:

    @checked
    def my_loss(tokens: PolicyTokens, *, margin: Annotated[float, number(above=0.0)] = 0.2) -> TokenLosses: ...

`function_with_options` and `policy_loss_with_options` check the rules when they bind options, also for functions of
other packages. `checked` also checks direct calls, and `check_fields` checks a dataclass. Without a rule, an option
annotated float, int, bool, str, Mapping or Literal must have that type, and a float must not be NaN.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rl_core.errors import SettingsError
from rl_core.record_fields import converts_arguments

__all__ = ["OptionRule", "checked", "number", "whole_number"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class OptionRule:
    """The valid values of an option.

    Attributes:
        expected: Text that follows "must be" in messages, e.g. "a number in (0, 1]".
        allows: Whether a value is valid.
    """

    expected: str
    allows: Callable[[Any], bool]

    def or_none(self) -> "OptionRule":
        """Return a rule that also allows None."""
        return OptionRule(f"{self.expected}, or None", lambda value: value is None or self.allows(value))


@dataclass(frozen=True, slots=True)
class Below:
    """Marker, used together with a rule: the option must be below another option.

    Attributes:
        option: Name of the other option.
    """

    option: str


def number(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    can_be_inf: bool = False,
) -> OptionRule:
    """Return the rule for a number within bounds; never NaN, and finite unless `can_be_inf`.

    Args:
        at_least: Inclusive lower bound.
        above: Exclusive lower bound.
        at_most: Inclusive upper bound.
        below: Exclusive upper bound.
        can_be_inf: Allow inf, which usually disables the option.
    """
    edge = (math.inf, can_be_inf)
    low, has_low = (at_least, True) if at_least is not None else (above, False) if above is not None else edge
    high, has_high = (at_most, True) if at_most is not None else (below, False) if below is not None else edge
    low = -low if low == math.inf else low
    interval = f"{'[' if has_low else '('}{low:g}, {high:g}{']' if has_high else ')'}"

    def allows(value: Any) -> bool:
        if not is_number(value):
            return False
        return (low < value or (has_low and value == low)) and (value < high or (has_high and value == high))

    return OptionRule(f"a number in {interval}", allows)


def whole_number(*, at_least: int | None = None) -> OptionRule:
    """Return the rule for an integer, optionally with a minimum."""
    return OptionRule(
        "a whole number" + ("" if at_least is None else f" of at least {at_least}"),
        lambda value: _is_whole(value) and (at_least is None or value >= at_least),
    )


def is_number(value: object) -> bool:
    """Whether a value is a real number and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


PLAIN_RULES: dict[object, OptionRule] = {
    float: number(can_be_inf=True),
    int: whole_number(),
    bool: OptionRule("True or False", lambda value: isinstance(value, bool)),
    str: OptionRule("a string", lambda value: isinstance(value, str)),
    Mapping: OptionRule("a mapping of names to values", lambda value: isinstance(value, Mapping)),
}
"""Rules for annotations that have no rule of their own."""

UnitInterval = Annotated[float, number(at_least=0.0, at_most=1.0)]
"""A number in [0, 1], such as a discount."""

Addend = Annotated[float, number(at_least=0.0)]
"""A small number added to a divisor that may be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredOptions:
    """The options of a function or a dataclass.

    Attributes:
        annotations: Annotation of each option by name.
        defaults: Default value of each optional option by name.
        takes_any: Whether the function accepts `**options`.
    """

    annotations: Mapping[str, Any]
    defaults: Mapping[str, Any]
    takes_any: bool = False

    def check(self, values: Mapping[str, Any], *, owner: str) -> None:
        """Check values against the rules.

        Args:
            values: Values by name; unknown names are ignored.
            owner: Owner of the options, for messages.

        Raises:
            SettingsError: An option is invalid; the message has its name, valid values and its value.
        """
        all_values = {**self.defaults, **values}
        for name in values.keys() & self.annotations.keys():
            rule = rule_of(self.annotations[name])
            if rule is not None and not rule.allows(values[name]):
                raise SettingsError(f"{name} of {owner} must be {rule.expected}; found {values[name]!r}.")
        for name, annotation in self.annotations.items():
            for other in (mark.option for mark in _marks(annotation) if isinstance(mark, Below)):
                if not all_values[name] < all_values[other]:
                    raise SettingsError(
                        f"{name} of {owner} must be below {other}; found {name} = {all_values[name]!r}, {other} = "
                        f"{all_values[other]!r}."
                    )


def declared_options(function: Callable[..., Any]) -> DeclaredOptions:
    """Return the keyword-only parameters of a function."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, TypeError):  # an annotation uses a name that is imported only for type checking
        signature = inspect.signature(function)
    parameters = signature.parameters.values()
    options = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return DeclaredOptions(
        annotations={option.name: option.annotation for option in options},
        defaults={option.name: option.default for option in options if option.default is not option.empty},
        takes_any=any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
    )


def checked(function: FunctionT) -> FunctionT:
    """Decorate a function so that every call checks its options and converts its other arguments."""
    declared, name = declared_options(function), function.__name__
    converting = converts_arguments(function)

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        declared.check(options, owner=name)
        return converting(*arguments, **options)

    return cast(FunctionT, call)


def check_fields(instance: Any, *, owner: str) -> None:
    """Check the fields of a dataclass; call it in `__post_init__`.

    Raises:
        SettingsError: A field is invalid; the message has its name, valid values and its value.
    """
    declared = DeclaredOptions(annotations=get_type_hints(type(instance), include_extras=True), defaults={})
    declared.check({name: getattr(instance, name) for name in declared.annotations}, owner=owner)


def rule_of(annotation: Any) -> OptionRule | None:
    """Return the rule of an annotation; None if any value is valid."""
    for mark in _marks(annotation):
        if isinstance(mark, OptionRule):
            return mark
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return rule_of(parts[0])
    if origin is Literal:
        return OptionRule(f"one of {', '.join(map(repr, parts))}", lambda value: value in parts)
    if origin in (Union, UnionType) and len(parts) == 2 and type(None) in parts:
        rule = rule_of(parts[0] if parts[1] is type(None) else parts[1])
        return None if rule is None else rule.or_none()
    return PLAIN_RULES.get(origin or annotation)


def _marks(annotation: Any) -> tuple[Any, ...]:
    return annotation.__metadata__ if get_origin(annotation) is Annotated else ()
