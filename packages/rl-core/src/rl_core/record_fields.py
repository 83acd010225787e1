"""Dataclasses that convert field values without loss, and raise an error for values that do not fit.

    @record
    class Scores:
        uid: str
        token_ids: Annotated[NDArray[np.int32], Axes("T")]
        logprobs: Annotated[NDArray[np.float32], Axes("T")]

The annotations are the rules. A list becomes the array, tensor, tuple or set that the field declares; 3.0 becomes an
int, a numpy number a Python number, and a string a `Path`. A single string for a sequence of strings, a bool for an
int, and a number that would change are errors. Open annotations (`Any`, callables, protocols) are not checked.
Bounds are marks of annotated_types: `Annotated[float, Gt(0)]`, `Annotated[str, MinLen(1)] | None`. They refuse NaN, and
`Lt(math.inf)` refuses inf too. `converts_arguments` does the same for function arguments.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial, wraps
from operator import attrgetter
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt

from rl_core.annotation_rules import BOUND_WORDS, Axes, ValueRule, known_rules
from rl_core.errors import DataError, SettingsError, ShapeError
from rl_core.secret_settings import redact_option

__all__ = [
    "BOUND_WORDS",
    "Axes",
    "FiniteFloat",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "UnitFloat",
    "converts_arguments",
    "fit_options",
    "record",
    "record_tuple",
    "settings_record",
]

RecordT = TypeVar("RecordT")
TupleT = TypeVar("TupleT", bound=tuple[Any, ...])
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
MAX_KNOWN = 64

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
FiniteFloat = Annotated[float, Gt(-math.inf), Lt(math.inf)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]
UnitFloat = Annotated[float, Ge(0), Le(1)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(kind: type[RecordT]) -> type[RecordT]:
    """Make a frozen, slotted, keyword-only dataclass that converts and checks its fields before its `__post_init__`.

    Raises:
        ShapeError: At construction: an array has another shape or kind of values, or values that would change.
        DataError: At construction: another field does not match its annotation.
    """
    return dataclass(frozen=True, slots=True, kw_only=True)(_checked(kind, DataError))


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings_record(kind: type[RecordT]) -> type[RecordT]:
    """Make a record as `record` does, with SettingsError for refused fields; the message has a line for each."""
    return dataclass(frozen=True, slots=True, kw_only=True)(_checked(kind, SettingsError))


def record_tuple(kind: type[TupleT]) -> type[TupleT]:
    """Convert and check the fields of a NamedTuple; its `_make` does not check."""
    make: Any = kind.__new__

    def new(made_of: Any, *values: Any, **named: Any) -> Any:
        made = make(made_of, *values, **named)
        changed = _rules_of(kind).changes(made, DataError)
        return made._replace(**dict(changed)) if changed else made

    kind.__new__ = new  # type: ignore[method-assign]
    return kind


def converts_arguments(function: FunctionT) -> FunctionT:
    """Wrap a function so that it converts and checks its arguments as a record does its fields.

    Raises:
        ShapeError: At a call: an argument cannot become the declared array or tensor.
        SettingsError: At a call: another keyword-only argument does not match its annotation.
        DataError: At a call: another argument does not match its annotation.
    """
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    positions = [one.name for one in parameters if one.kind in plain]
    names = [*positions, *(one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY)]
    rules = cache(lambda: known_rules(function, names))
    who = function.__qualname__.split(".")[-2] if function.__name__ == "__init__" else function.__name__

    def fitted(name: str, value: Any, rule: ValueRule | None) -> Any:
        if rule is None or type(value) in rule.exact:
            return value
        return _fitted(name, value, rule, who=who, error=DataError if name in positions else SettingsError)

    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        known = rules()
        by_name = {name: fitted(name, value, known.get(name)) for name, value in named.items()}
        fitting = [fitted(name, value, known.get(name)) for name, value in zip(positions, values, strict=False)]
        return function(*fitting, *values[len(fitting) :], **by_name)

    return cast(FunctionT, call)


def fit_options(function: Callable[..., Any], options: Mapping[str, Any], *, owner: str) -> dict[str, Any]:
    """Check and convert options of a function by its annotations, before they are bound.

    Args:
        function: A function, an object that can be called, or a record, also of another package.
        options: Values by name; those without an annotation are kept.
        owner: Owner of the options, for messages.

    Raises:
        SettingsError: An option is invalid or NaN; the message has its name, valid values and its value.
    """
    function = function.func if isinstance(function, partial) else function
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = type(function).__call__
    fitting = dict(options)
    for name, rule in known_rules(function, options).items():
        fitting[name] = _fitted(name, options[name], rule, who=owner, error=SettingsError)
        if isinstance(fitting[name], float) and math.isnan(fitting[name]):
            raise rule.refusal(name, fitting[name], owner, SettingsError, TypeError())
    return fitting


def _fitted(name: str, value: Any, rule: ValueRule, *, who: str, error: type[Exception]) -> Any:
    try:
        return rule.fit(value)
    except Exception as reason:
        raise rule.refusal(name, value, who, error, reason) from reason


class _Rules:
    """The rules of a record's fields; values whose type already fits are not inspected."""

    def __init__(self, kind: Any) -> None:
        rules = known_rules(kind, _names_of(kind))
        self.arrays = [(name, rule.axes.names) for name, rule in rules.items() if rule.axes and rule.axes.names]
        self._rules = list(rules.items())
        self._values: Any = (
            attrgetter(*rules) if len(rules) > 1 else lambda made: [getattr(made, name) for name in rules]
        )
        self._arrays: Any = attrgetter(*(name for name, _ in self.arrays)) if len(self.arrays) > 1 else None
        self._are_alike = len({axes for _, axes in self.arrays}) == 1
        self._to_convert: dict[tuple[type, ...], list[tuple[int, str, ValueRule]]] = {}

    def changes(self, made: Any, error: type[Exception]) -> list[tuple[str, Any]]:
        """Return the fields whose converted value differs from the given one."""
        values = self._values(made)
        kinds = tuple(map(type, values))
        unfitting = self._to_convert.get(kinds)
        if unfitting is None:
            unfitting = [(i, *named) for i, named in enumerate(self._rules) if kinds[i] not in named[1].exact]
            if len(self._to_convert) < MAX_KNOWN:
                self._to_convert[kinds] = unfitting
        changed, refused = [], list[tuple[Exception, Exception]]()
        for index, name, rule in unfitting:
            value = values[index]
            try:
                fitting = rule.fit(value)
            except Exception as reason:
                refused.append((rule.refusal(name, value, _who(made, until=name), error, reason), reason))
                continue
            if fitting is not value:
                changed.append((name, fitting))
        if refused:
            first, cause = refused[0]
            raise type(first)("\n".join(str(refusal) for refusal, _ in refused)) from cause
        return changed

    def check_lengths(self, made: Any) -> None:
        """Raise an error if axes with the same name differ in length."""
        arrays = self._arrays(made)
        if self._are_alike and len({getattr(array, "shape", None) for array in arrays}) == 1:
            return
        known: dict[str, tuple[int, str]] = {}
        for (name, axes), array in zip(self.arrays, arrays, strict=True):
            for axis, size in () if array is None else zip(axes, array.shape, strict=True):
                expected, first = known.setdefault(axis, (size, name))
                if size != expected:
                    wanted = f"{Axes(*axes)} with {axis} = {expected}, as {first} has"
                    who = _who(made, until=name)
                    raise ShapeError(f"{name} of {who} must have shape {wanted}; found {list(array.shape)}.")


_rules_of = cache(_Rules)


def _checked(kind: type[RecordT], error: type[Exception]) -> type[RecordT]:
    own = kind.__dict__.get("__post_init__")

    def post_init(self: Any) -> None:
        rules = _rules_of(cast(Any, type(self)))
        for name, value in rules.changes(self, error):
            object.__setattr__(self, name, value)
        if len(rules.arrays) > 1:
            rules.check_lengths(self)
        if own is not None:
            own(self)

    kind.__post_init__ = post_init  # type: ignore[attr-defined]
    return kind


def _names_of(kind: Any) -> Sequence[str]:
    return kind._fields if issubclass(kind, tuple) else [one.name for one in fields(kind) if one.init]


def _who(made: Any, *, until: str) -> str:
    """The record's leading names and numbers, such as Trajectory(prompt_uid='p7', session_index=3)."""
    leading = []
    for name in _names_of(type(made)):
        value = getattr(made, name)
        if type(value) not in (str, int) or name == until:
            break
        leading.append(f"{name}={redact_option(name, value)!r}")
    return type(made).__name__ + (f"({', '.join(leading)})" if leading else "")
