"""Validation of option values; imports without torch."""

import math
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any


def not_whole(options: object, least: Mapping[str, int], *, or_none: bool = False) -> Iterator[str]:
    """Yield a message for each option that is not a whole number of at least its minimum."""
    for name, at_least in least.items():
        value = getattr(options, name)
        if or_none and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
            also = ", or none" if or_none else ""
            yield f"{name} must be a whole number of at least {at_least}{also}; found {value!r}."


def not_numbers(
    options: object, names: tuple[str, ...], *, above: float = -math.inf, at_least: float = -math.inf
) -> Iterator[str]:
    """Yield a message for each option that is not a finite number within the bounds."""
    wanted = f"above {above:g}" if above > at_least else f"at least {at_least:g}"
    for name in names:
        value = getattr(options, name)
        if not is_number(value) or not (value > above and value >= at_least):
            yield f"{name} must be {wanted}; found {f'{value:g}' if isinstance(value, Real) else repr(value)}."


def not_among(options: object, known: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Yield a message for each option that is not one of its allowed values."""
    for name, values in known.items():
        value = getattr(options, name)
        if value not in values:
            yield f"{name} must be one of {', '.join(map(repr, values))}; found {value!r}."


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and not a boolean."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
