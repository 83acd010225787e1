"""When rewards count as equal: the one tolerance of filters, advantages and metrics."""

from typing import Any

NOISE = 1e-6
"""Largest difference of equal rewards: some roundings in float32, whose unit is 1.2e-7, of terms of order 1.

Larger rewards round more, in proportion. Smaller ones may be sums of such terms, so rewards that differ by less must be
scaled up.
"""


def are_equal_rewards(lowest: Any, highest: Any) -> Any:
    """Return True if all rewards between these two differ only by rounding.

    A group of such rewards has nothing to teach, and a division by its standard deviation would amplify the rounding.

    Args:
        lowest: A number, or an array or tensor of any shape.
        highest: The same, not below `lowest`.

    Returns:
        A bool, or an array or tensor of bool in the arguments' shape.
    """
    difference = highest - lowest
    return (lowest == highest) | (difference <= NOISE) | (difference <= NOISE / 2 * (abs(lowest) + abs(highest)))
