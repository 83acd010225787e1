"""When rewards count as equal: the one tolerance of filters, advantages and metrics."""

from typing import Any

RELATIVE_NOISE = 1e-6
"""Largest difference of equal rewards, relative to them: some roundings in float32, whose unit is 1.2e-7."""


def are_equal_rewards(lowest: Any, highest: Any) -> Any:
    """Return True if all rewards between these two differ only by rounding.

    A group of such rewards has nothing to teach, and a division by its standard deviation would amplify the rounding.

    Args:
        lowest: A number, or an array or tensor of any shape.
        highest: The same, not below `lowest`.

    Returns:
        A bool, or an array or tensor of bool in the arguments' shape.
    """
    return (lowest == highest) | (highest - lowest <= RELATIVE_NOISE / 2 * (abs(lowest) + abs(highest)))
