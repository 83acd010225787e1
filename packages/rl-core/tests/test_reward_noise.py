"""When rewards count as equal."""

import numpy as np
import pytest

from rl_core.data import are_equal_rewards


@pytest.mark.parametrize(
    ("lowest", "highest", "expected"),
    [
        (1.0, 1.0, True),
        (0.0, 0.0, True),
        (1.0, 1.0 + 1.2e-7, True),
        (-1e6 - 0.1, -1e6, True),
        (float("inf"), float("inf"), True),
        (1.0, 1.0 + 2e-6, False),
        (0.0, 3e-8, True),
        (-1e-9, 1e-9, True),
        (0.0, 2e-6, False),
        (-1e-6, 1e-6, False),
        (0, 1, False),
    ],
)
def test_rewards_are_equal_up_to_rounding(lowest: float, highest: float, expected: bool) -> None:
    assert are_equal_rewards(lowest, highest) == expected


def test_arrays_are_compared_by_element() -> None:
    assert are_equal_rewards(np.array([0.0, 1.0]), np.array([1.0, 1.0])).tolist() == [False, True]
