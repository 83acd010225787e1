"""Rules derived from type annotations for record fields and function arguments."""

import dataclasses
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from annotated_types import BaseMetadata, GroupedMetadata
from numpy.typing import NDArray

from rl_core.errors import DataError, ShapeError
from rl_core.secret_settings import redact_option

Fit = Callable[[Any], Any]
"""Returns the converted value; raises if the value does not fit."""
KindT = TypeVar("KindT")
NONE = type(None)
SHOWN_CHARS = 80


class Axes:
    """Names of an array's axes; axes with the same name have the same length within a record."""

    __slots__ = ("names",)

    def __init__(self, *names: str) -> None:
        """Store the names, for example Axes("T", "K")."""
        self.names = names

    def __str__(self) -> str:
        return f"[{', '.join(self.names)}]"


class ValueRule(NamedTuple):
    """The rule for one value.

    Attributes:
        expected: Text that follows "must be" in error messages.
        exact: Types whose values always fit.
        fit: Converts values of other types.
        axes: Axes of an array or tensor; None for other values.
    """

    expected: str
    exact: frozenset[type]
    fit: Fit
    axes: Axes | None = None

    def refusal(self, name: str, value: Any, who: str, error: type[Exception], reason: Exception) -> Exception:
        """The error to raise when `fit` raised; a user's own type can raise any exception."""
        made = [kind.__name__ for kind in self.exact if self.axes is None and hasattr(kind, "from_padded")]
        advice = f" Make one with {made[0]}.from_padded(...)." if made else None
        return (ShapeError if self.axes is not None else error)(
            _refusal(f"{name} of {who}", self.expected, value, reason, advice=advice)
        )


class _ItemError(TypeError):
    """One item of a collection does not fit."""


def _refusal(who: str, expected: str, value: Any, reason: Exception, *, advice: str | None = None) -> str:
    more = f", with {reason}" if isinstance(reason, OverflowError | _ItemError) else ""
    advice = advice_for(value) if advice is None else advice
    return f"{who} must be {expected}; found {seen(who.split(' ')[0], value)}{more}.{advice}"


def seen(name: str, value: Any) -> str:
    """An array's dtype and shape; for other values, the shortened repr without secrets, and the type."""
    try:
        if getattr(value, "shape", ()) and hasattr(value, "dtype"):
            return f"{value.dtype} of shape {list(value.shape)}"
        text = repr(redact_option(name, value))
    except Exception:
        text = "an object whose repr failed"
    return f"{text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + '...'} ({type(value).__name__})"


def advice_for(value: Any) -> str:
    """A sentence on how to make a tensor readable by numpy; empty if it already is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return ""
    needed = {
        ".detach()": value.requires_grad,
        ".float()": value.dtype == torch.bfloat16,
        ".cpu()": value.device.type != "cpu",
    }
    calls = "".join(call for call, is_needed in needed.items() if is_needed)
    return f" Pass tensor{calls}." if calls else ""


# -- rules of annotations


def known_rules(kind: Any, names: Iterable[str]) -> dict[str, ValueRule]:
    """Return the rules of a record's fields or a function's parameters; annotations without a rule are omitted."""
    try:
        hints = get_type_hints(kind, include_extras=True)
    except (NameError, AttributeError, TypeError):  # one uses a name that is imported only under TYPE_CHECKING
        hints = {name: hint for name, hint in getattr(kind, "__annotations__", {}).items() if not isinstance(hint, str)}
    found = {name: rule_of(hints.get(name, Any)) for name in names}
    return {name: rule for name, rule in found.items() if rule is not None}


def rule_of(hint: Any) -> ValueRule | None:
    """Return the rule of an annotation; None if it accepts any value."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        axes = [mark for mark in hint.__metadata__ if isinstance(mark, Axes)]
        return _array_rule(parts[0], axes[0]) if axes else _bounded(rule_of(parts[0]), hint.__metadata__)
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, type) and (hint.__module__, hint.__name__) == ("torch", "Tensor"):
        return ValueRule("a Tensor", frozenset({hint}), _tensor_fit(hint), Axes())
    if origin is Literal:
        return ValueRule(f"one of {', '.join(map(repr, parts))}", frozenset(), _only(lambda value: value in parts))
    if origin in (Union, types.UnionType):
        return _union_rule([rule_of(part) for part in parts])
    if isinstance(hint, TypeVar) and hint.__constraints__:
        return _union_rule([rule_of(part) for part in hint.__constraints__])
    if not isinstance(kind := origin or hint, type):
        return None
    if origin is np.ndarray:
        return _array_rule(hint, Axes())
    if issubclass(kind, Mapping) and parts:
        return _mapping_rule(*map(rule_of, parts))
    if issubclass(kind, Sequence | frozenset) and parts:
        return _collection_rule(kind, parts)
    if origin is not None or kind in (object, Any) or getattr(kind, "_is_protocol", False):
        return None
    return ValueRule(f"a {kind.__name__}", frozenset({kind}), _only(lambda value: isinstance(value, kind)))


def _only(fits: Callable[[Any], bool]) -> Fit:
    def fit(value: Any) -> Any:
        if not fits(value):
            raise TypeError
        return value

    return fit


BOUND_WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
"""A bound of a number in words, by the name of its limit in annotated_types and in pydantic's errors."""

BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    **{name: (words, getattr(operator, name)) for name, words in BOUND_WORDS.items()},
    "min_length": ("of length at least", lambda value, limit: len(value) >= limit),
    "max_length": ("of length at most", lambda value, limit: len(value) <= limit),
}
"""Constraints of annotated_types by the name of their limit: the words of a message, and the comparison."""


def _bounded(rule: ValueRule | None, marks: Iterable[Any]) -> ValueRule | None:
    """The rule with the bounds among an annotation's marks; NaN is within no bound, and a bool is not a number."""
    flat = [one for mark in marks for one in (mark if isinstance(mark, GroupedMetadata) else (mark,))]
    limits = [_limit(mark) for mark in flat if isinstance(mark, BaseMetadata)]
    if rule is None or not limits:
        return rule
    words = " and ".join(
        f"{BOUNDS[name][0]} {limit if isinstance(limit, int) else format(limit, 'g')}"
        for name, limit in limits
        if abs(limit) != math.inf
    )
    words = f"of {words}" if words.startswith("at ") else words
    expected = "a finite number" if ("lt", math.inf) in limits else rule.expected
    expected += f"{' ' if rule.exact else ', '}{words}" if words else ""

    exact, convert, checks = rule.exact, rule.fit, [(BOUNDS[name][1], limit) for name, limit in limits]

    def fit(value: Any) -> Any:
        fitting = value if type(value) in exact else convert(value)
        if value is True or value is False:
            raise TypeError
        for is_within, limit in checks:
            if not is_within(fitting, limit):
                raise TypeError
        return fitting

    return ValueRule(expected, frozenset(), fit)


def _limit(mark: BaseMetadata) -> tuple[str, Any]:
    name = dataclasses.fields(mark)[0].name  # type: ignore[arg-type]  # every mark is a dataclass
    if name not in BOUNDS:
        raise TypeError(f"a record cannot check {mark}; it reads {', '.join(BOUNDS)}. Check it in __post_init__.")
    return name, getattr(mark, name)


def _array_rule(hint: Any, axes: Axes) -> ValueRule:
    optional = [part for part in get_args(hint) if part is not NONE] if NONE in get_args(hint) else [hint]
    (_, (scalar,)) = get_args(optional[0])[0], get_args(get_args(optional[0])[1])
    dtype = None if scalar is Any else np.dtype(scalar)

    num_axes = len(axes.names)

    def fit(value: Any) -> NDArray[Any]:
        if type(value) is np.ndarray and value.dtype is dtype and value.ndim == num_axes:
            return value
        array: NDArray[Any] = np.asarray(value)
        if dtype is not None and array.dtype != dtype:
            array = converted(array, dtype)
        if num_axes and array.ndim != num_axes:
            raise TypeError
        return array

    expected = f"{axes if axes.names else 'an array of'} {dtype or 'numbers'}"
    return ValueRule(expected, frozenset({NONE} if optional[0] is not hint else ()), fit, axes)


def several(values: Iterable[KindT], kind: type[KindT], name: str) -> list[KindT]:
    """Return a sequence of records of one kind as a list.

    Raises:
        DataError: The value is a single record, or an item has another type, such as a dict of a record's fields.
    """
    what = f"{name} must be a list of {kind.__name__}"
    if isinstance(values, kind):
        raise DataError(f"{what}; found a single {kind.__name__}. Wrap it in a list.")
    if isinstance(values, Mapping | str | bytes) or not isinstance(values, Iterable):
        raise DataError(f"{what}; found {seen(name, values)}.")
    given = list(values)
    for index, one in enumerate(given):
        if not isinstance(one, kind):
            advice = f" Convert it with {kind.__name__}(**fields)." if isinstance(one, Mapping) else ""
            raise DataError(f"{what}; found {seen(name, one)} at {index}.{advice}")
    return given


def expect(value: Any, name: str, *kinds: Any) -> None:
    """Raise an error if a value has another type.

    Raises:
        DataError: The type differs; the message names both types.
    """
    if not isinstance(value, kinds):
        raise DataError(f"{name} must be a {' or a '.join(one.__name__ for one in kinds)}; found {seen(name, value)}.")


def array_of(value: Any, *, who: str, dtype: Any = None) -> NDArray[Any]:
    """Convert a value to an array.

    Args:
        value: An array, a tensor or lists.
        who: Name of the value in error messages, such as "column 'reward'".
        dtype: Target dtype; None keeps the dtype of the value.

    Raises:
        ShapeError: The value cannot become an array of that dtype.
    """
    try:
        array: NDArray[Any] = np.asarray(value)
        return array if dtype is None or array.dtype == dtype else converted(array, np.dtype(dtype))
    except Exception as reason:  # a user's type can raise any exception, as in `ValueRule.fit`
        raise ShapeError(_refusal(who, f"an array of {dtype or 'numbers'}", value, reason)) from reason


def converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert an array to another dtype; floats are rounded, all other values must not change."""
    kinds = array.dtype.kind + dtype.kind
    if kinds[0] not in "biuf" or kinds in ("bi", "bu"):
        raise TypeError
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.astype(dtype)
        ours, theirs = [np.isfinite(one) if kinds == "ff" else one for one in (converted, array)]
    if not np.array_equal(ours, theirs):
        raise OverflowError(f"values that do not fit into {dtype}")
    return converted


def _tensor_fit(kind: Any) -> Fit:
    def fit(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        torch = sys.modules["torch"]  # `kind` is its class, so it is imported
        made = torch.tensor(np.asarray(value))
        is_of_lists = made.is_floating_point() and not hasattr(value, "dtype")
        return made.to(torch.get_default_dtype()) if is_of_lists else made

    return fit


def _union_rule(rules: Sequence[ValueRule | None]) -> ValueRule | None:
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
    return ValueRule(" or ".join(rule.expected for rule in known), exact, fit)


def _collection_rule(kind: Any, parts: tuple[Any, ...]) -> ValueRule:
    """The rule for tuples, lists, sets and sequences; a tuple of fixed length has an annotation per item."""
    is_fixed = kind is tuple and ... not in parts
    rules = [rule_of(part) for part in parts if part is not ...]
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
    return ValueRule(f"{name}, {', '.join(names) if is_fixed else f'each {names[0]}'}", frozenset(), fit)


def _mapping_rule(of_keys: ValueRule | None, of_values: ValueRule | None) -> ValueRule:
    def has_all(rule: ValueRule | None, values: Iterable[Any]) -> bool:
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
    return ValueRule(f"a mapping, {names[0]} to {names[1]}", frozenset(), fit)


def _item(value: Any, rule: ValueRule | None, at: object) -> Any:
    """Convert one item; an error names its key or index in the collection."""
    try:
        return value if rule is None or type(value) in rule.exact else rule.fit(value)
    except OverflowError:
        raise
    except Exception as reason:
        raise _ItemError(f"{type(value).__name__} at {at!r}") from reason


def _number(kind: type, *, allows: Callable[[Any], bool]) -> Fit:
    def fit(value: Any) -> Any:
        value = value.item() if getattr(value, "ndim", None) == 0 else value  # a zero-dimensional array or tensor
        if not allows(value):
            raise TypeError
        return kind(value)

    return fit


def _is_whole(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and (isinstance(value, Integral) or value == value // 1)


def _plain(expected: str, kind: type, fit: Fit) -> ValueRule:
    return ValueRule(expected, frozenset({kind}), fit)


PLAIN: dict[Any, ValueRule] = {
    int: _plain("a whole number", int, _number(int, allows=_is_whole)),
    float: _plain("a number", float, _number(float, allows=lambda value: isinstance(value, Real))),
    bool: _plain("True or False", bool, _number(bool, allows=lambda value: isinstance(value, bool))),
    str: _plain("a string", str, _only(lambda value: isinstance(value, str))),
    NONE: _plain("None", NONE, _only(lambda value: value is None)),
    Path: _plain("a path", Path, Path),
}
"""Rules of plain types."""
