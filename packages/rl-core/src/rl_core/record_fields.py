"""Records, whose fields are converted where nothing is lost, and else refused where a record is made.

    @record
    class Scores:
        uid: str
        token_ids: Annotated[NDArray[np.int32], Axes("T")]
        logprobs: Annotated[NDArray[np.float32], Axes("T")]

Annotations are the rules. A list becomes the array, the tuple or the set that the field holds, 3.0 an int where an int
is meant, a numpy number Python's, a text a `Path`. A text in the place of several texts, a bool in the place of an int
and a number that changes are refused. What an annotation leaves open (`Any`, callables, protocols) is not looked at.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from operator import attrgetter
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError, SettingsError, ShapeError
from rl_core.secret_settings import redact_option

__all__ = ["Axes", "record", "record_tuple", "settings_record"]

RecordT = TypeVar("RecordT")
TupleT = TypeVar("TupleT", bound=tuple[Any, ...])
Fit = Callable[[Any], Any]
"""Gives a value as a record holds it; raises where it cannot."""
NONE = type(None)
SHOWN_CHARS = 80
MAX_KNOWN = 64


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(kind: type[RecordT]) -> type[RecordT]:
    """A frozen, slotted, keyword-only dataclass that converts or refuses its fields, before its own `__post_init__`.

    Raises:
        ShapeError: Where one is made: an array has another shape, another kind of values, or values that change.
        DataError: Another field is not what its annotation says.
    """
    return dataclass(frozen=True, slots=True, kw_only=True)(_checked(kind, DataError))


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings_record(kind: type[RecordT]) -> type[RecordT]:
    """As `record`, for options: what is refused is a SettingsError."""
    return dataclass(frozen=True, slots=True, kw_only=True)(_checked(kind, SettingsError))


def record_tuple(kind: type[TupleT]) -> type[TupleT]:
    """The same for a NamedTuple; its `_make` does not look."""
    make: Any = kind.__new__

    def new(made_of: Any, *values: Any, **named: Any) -> Any:
        made = make(made_of, *values, **named)
        changed = _rules_of(kind).changes(made, DataError)
        return made._replace(**dict(changed)) if changed else made

    kind.__new__ = new  # type: ignore[method-assign]
    return kind


class Axes:
    """Names of an array's axes; axes of one name are equally long in a record."""

    __slots__ = ("names",)

    def __init__(self, *names: str) -> None:
        """Such as Axes("T", "K")."""
        self.names = names

    def __str__(self) -> str:
        return f"[{', '.join(self.names)}]"


class _Rule(NamedTuple):
    """What a value must be.

    Attributes:
        expected: For messages, after "must be".
        exact: Types of values that fit, whatever they are.
        fit: For values of other types.
        axes: Of an array; None for what is none.
    """

    expected: str
    exact: frozenset[type]
    fit: Fit
    axes: Axes | None = None


class _ItemError(TypeError):
    """One value of several does not fit."""


class _Rules:
    """Those of a record's fields; looks only at values whose type does not say that they fit."""

    def __init__(self, kind: Any) -> None:
        try:
            hints = get_type_hints(kind, include_extras=True)
        except NameError:  # one is imported for type checks alone
            hints = {name: hint for name, hint in kind.__annotations__.items() if not isinstance(hint, str)}
        found = {name: _rule_of(hints.get(name, Any)) for name in _names_of(kind)}
        rules = {name: rule for name, rule in found.items() if rule is not None}
        self.arrays = [(name, rule.axes.names) for name, rule in rules.items() if rule.axes and rule.axes.names]
        self._rules = list(rules.items())
        self._values: Any = (
            attrgetter(*rules) if len(rules) > 1 else lambda made: [getattr(made, name) for name in rules]
        )
        self._arrays: Any = attrgetter(*(name for name, _ in self.arrays)) if len(self.arrays) > 1 else None
        self._are_alike = len({axes for _, axes in self.arrays}) == 1
        self._to_look_at: dict[tuple[type, ...], list[tuple[int, str, _Rule]]] = {}

    def changes(self, made: Any, error: type[Exception]) -> list[tuple[str, Any]]:
        """The fields that must be held otherwise than they were given."""
        values = self._values(made)
        kinds = tuple(map(type, values))
        looks = self._to_look_at.get(kinds)
        if looks is None:
            looks = [(i, *named) for i, named in enumerate(self._rules) if kinds[i] not in named[1].exact]
            if len(self._to_look_at) < MAX_KNOWN:
                self._to_look_at[kinds] = looks
        changed = []
        for index, name, rule in looks:
            value = values[index]
            try:
                fitting = rule.fit(value)
            except Exception as reason:  # a value of the user's own can raise anything when it is read
                refused = ShapeError if rule.axes is not None else error
                more = f", with {reason}" if isinstance(reason, OverflowError | _ItemError) else ""
                who = _who(made, until=name)
                raise refused(f"{name} of {who} must be {rule.expected}; found {_seen(name, value)}{more}.") from reason
            if fitting is not value:
                changed.append((name, fitting))
        return changed

    def check_lengths(self, made: Any) -> None:
        """Refuse arrays whose axes of one name differ."""
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
    return kind._fields if issubclass(kind, tuple) else [one.name for one in fields(kind)]


def _who(made: Any, *, until: str) -> str:
    """Such as Trajectory(prompt_uid='p7', session_index=3): the names and numbers that a record begins with."""
    said = []
    for name in _names_of(type(made)):
        value = getattr(made, name)
        if type(value) not in (str, int) or name == until:
            break
        said.append(f"{name}={redact_option(name, value)!r}")
    return type(made).__name__ + (f"({', '.join(said)})" if said else "")


def _seen(name: str, value: Any) -> str:
    """An array by its dtype and shape, else what it says of itself, cut and without secrets, and its type."""
    try:
        if getattr(value, "shape", ()) and hasattr(value, "dtype"):
            return f"{value.dtype} of shape {list(value.shape)}"
        text = repr(redact_option(name, value))
    except Exception:
        text = "something that cannot be shown"
    return f"{text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + '...'} ({type(value).__name__})"


# -- rules of annotations


def _rule_of(hint: Any) -> _Rule | None:
    """The rule that an annotation means; None where anything goes."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        marks = [mark for mark in hint.__metadata__ if isinstance(mark, Axes)]
        return _array_rule(parts[0], marks[0]) if marks else _rule_of(parts[0])
    if hint in PLAIN:
        return PLAIN[hint]
    if origin is Literal:
        return _Rule(f"one of {', '.join(map(repr, parts))}", frozenset(), _only(lambda value: value in parts))
    if origin in (Union, types.UnionType):
        return _union_rule([_rule_of(part) for part in parts])
    if not isinstance(kind := origin or hint, type):
        return None
    if origin is np.ndarray:
        return _array_rule(hint, Axes())
    if issubclass(kind, Mapping) and parts:
        return _mapping_rule(*map(_rule_of, parts))
    if issubclass(kind, Sequence | frozenset) and parts:
        return _collection_rule(kind, parts)
    if origin is not None or kind in (object, Any) or getattr(kind, "_is_protocol", False):
        return None
    return _Rule(f"a {kind.__name__}", frozenset({kind}), _only(lambda value: isinstance(value, kind)))


def _only(fits: Callable[[Any], bool]) -> Fit:
    def fit(value: Any) -> Any:
        if not fits(value):
            raise TypeError
        return value

    return fit


def _array_rule(hint: Any, axes: Axes) -> _Rule:
    optional = [part for part in get_args(hint) if part is not NONE] if NONE in get_args(hint) else [hint]
    (_, (scalar,)) = get_args(optional[0])[0], get_args(get_args(optional[0])[1])
    dtype = None if scalar is Any else np.dtype(scalar)

    num_axes = len(axes.names)

    def fit(value: Any) -> NDArray[Any]:
        if type(value) is np.ndarray and value.dtype is dtype and value.ndim == num_axes:
            return value
        array: NDArray[Any] = np.asarray(value)
        if dtype is not None and array.dtype != dtype:
            array = _converted(array, dtype)
        if num_axes and array.ndim != num_axes:
            raise TypeError
        return array

    expected = f"{axes if axes.names else 'an array of'} {dtype or 'numbers'}"
    return _Rule(expected, frozenset({NONE} if optional[0] is not hint else ()), fit, axes)


def _converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array with another dtype; floats are rounded, everything else must stay what it is."""
    kinds = array.dtype.kind + dtype.kind
    if kinds[0] not in "biuf" or kinds in ("bi", "bu"):
        raise TypeError
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.astype(dtype)
        ours, theirs = [np.isfinite(one) if kinds == "ff" else one for one in (converted, array)]
    if not np.array_equal(ours, theirs):
        raise OverflowError(f"values that {dtype} cannot hold")
    return converted


def _union_rule(rules: Sequence[_Rule | None]) -> _Rule | None:
    known = [rule for rule in rules if rule is not None]
    if len(known) < len(rules):
        return None

    def fit(value: Any) -> Any:
        for rule in known:
            try:
                return rule.fit(value)
            except Exception as reason:
                last = reason
        raise last

    exact = frozenset[type]().union(*(rule.exact for rule in known))
    return _Rule(" or ".join(rule.expected for rule in known), exact, fit)


def _collection_rule(kind: Any, parts: tuple[Any, ...]) -> _Rule:
    """Of tuples, lists, sets and sequences; a tuple of a fixed length has an annotation for each place."""
    is_fixed = kind is tuple and ... not in parts
    rules = [_rule_of(part) for part in parts if part is not ...]
    made = kind if kind in (frozenset, list) else tuple
    exact = frozenset[type]() if is_fixed or rules[0] is None else rules[0].exact

    def fit(value: Any) -> Any:
        if type(value) is made:
            if exact.issuperset(map(type, value)):
                return value
        elif isinstance(value, str | bytes) or not isinstance(value, Sequence | AbstractSet | np.ndarray):
            raise TypeError
        of_each = rules if is_fixed else rules * len(value)
        fitting = [_item(one, rule, at) for at, (one, rule) in enumerate(zip(value, of_each, strict=True))]
        is_kept = isinstance(value, kind) and all(map(lambda one, other: one is other, fitting, value))
        return value if is_kept else made(fitting)

    names = [rule.expected if rule is not None else "anything" for rule in rules]
    name = {frozenset: "a set", tuple: "a tuple"}.get(kind, "a sequence")
    return _Rule(f"{name}, {', '.join(names) if is_fixed else f'each {names[0]}'}", frozenset(), fit)


def _mapping_rule(of_keys: _Rule | None, of_values: _Rule | None) -> _Rule:
    def has_all(rule: _Rule | None, values: Iterable[Any]) -> bool:
        return rule is None or rule.exact.issuperset(map(type, values))

    def fit(value: Any) -> Any:
        if type(value) is dict and (not value or (has_all(of_keys, value) and has_all(of_values, value.values()))):
            return value
        if not isinstance(value, Mapping):
            raise TypeError
        fitting = [(_item(key, of_keys, key), _item(one, of_values, key)) for key, one in value.items()]
        is_kept = all(map(lambda new, old: new[0] is old[0] and new[1] is old[1], fitting, value.items()))
        return value if is_kept else dict(fitting)

    names = [rule.expected if rule is not None else "anything" for rule in (of_keys, of_values)]
    return _Rule(f"a mapping, {names[0]} to {names[1]}", frozenset(), fit)


def _fitting(value: Any, rule: _Rule | None) -> Any:
    return value if rule is None or type(value) in rule.exact else rule.fit(value)


def _item(value: Any, rule: _Rule | None, at: object) -> Any:
    """As `_fitting`; what does not fit is named by its place in a mapping or sequence."""
    try:
        return _fitting(value, rule)
    except OverflowError:
        raise
    except Exception as reason:
        raise _ItemError(f"{type(value).__name__} at {at!r}") from reason


def _number(kind: type, *, allows: Callable[[Any], bool]) -> Fit:
    def fit(value: Any) -> Any:
        value = value.item() if getattr(value, "ndim", None) == 0 else value  # an array or a tensor without axes
        if not allows(value):
            raise TypeError
        return kind(value)

    return fit


def _is_whole(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and (isinstance(value, Integral) or value == value // 1)


def _plain(expected: str, kind: type, fit: Fit) -> _Rule:
    return _Rule(expected, frozenset({kind}), fit)


PLAIN: dict[Any, _Rule] = {
    int: _plain("a whole number", int, _number(int, allows=_is_whole)),
    float: _plain("a number", float, _number(float, allows=lambda value: isinstance(value, Real))),
    bool: _plain("True or False", bool, _number(bool, allows=lambda value: isinstance(value, bool))),
    str: _plain("a text", str, _only(lambda value: isinstance(value, str))),
    NONE: _plain("None", NONE, _only(lambda value: value is None)),
    Path: _plain("a path", Path, Path),
}
"""For an annotation alone."""
