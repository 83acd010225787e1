"""Kinds of health checks, compared with values computed by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rl_metrics.health.checks import KINDS


def measured(kind, *columns, window, **limits):
    found = KINDS[kind](tuple(np.array(column, dtype=np.float64) for column in columns), limits, window)
    return found.values.tolist(), found.is_wrong.tolist()


def test_level_is_the_median_of_a_window():
    values, is_wrong = measured("level", [1, 1, 5, 5, 5], window=3, max=2.0)
    assert values == [1, 1, 1, 5, 5]
    assert is_wrong == [False, False, False, True, True]
    assert measured("level", [1, 1, 5, 5, 5], window=1, min=2.0)[1] == [True, True, False, False, False]


def test_level_of_a_quotient_is_defined_at_zero():
    values, is_wrong = measured("level", [1, 0, 1, 1], [4, 0, 2, 0], window=1, max=0.4)
    assert values[:3] == [0.25, 0.0, 0.5]  # 0 / 0 counts as 0
    assert is_wrong == [False, False, True, True]  # 1 / 0 exceeds any limit


def test_mean_level_sees_shares_that_take_turns():
    values, is_wrong = measured("mean_level", [0, 1, 0, 1], window=2, max=0.4)
    assert values == [0.0, 0.5, 0.5, 0.5]
    assert is_wrong == [False, True, True, True]


def test_highest_keeps_one_bad_value_for_a_window():
    assert measured("highest", [0, 3, 0, 0], window=2, max=1.0) == ([0, 3, 3, 0], [False, True, True, False])


def test_zero_takes_all_columns_and_the_whole_window():
    values, is_wrong = measured("zero", [1, 0, 0, 0], [-2, 0, 0, 0], window=2, max=1e-9)
    assert values == [2, 2, 0, 0]
    assert is_wrong == [False, False, True, True]


def test_fall_is_a_share_of_the_best():
    values, is_wrong = measured("fall", [0.2, 0.8, 0.6, 0.4], window=1, max=0.3, by=0.01)
    assert values == pytest.approx([0, 0, 0.25, 0.5])
    assert is_wrong == [False, False, False, True]


def test_fall_of_negative_rewards_is_a_share_of_the_way_up():
    values, _ = measured("fall", [-10, -1, -4], window=1, max=0.3)
    assert values == pytest.approx([0, 0, 1 / 3])  # 3 of the gain of 9


def test_a_penalty_that_was_never_paid_does_not_fall_by_a_trifle():
    assert not any(measured("fall", [0, 0, -0.001], window=1, max=0.3, by=0.05)[1])
    assert measured("fall", [0, 0, -0.2], window=1, max=0.3, by=0.05)[1] == [False, False, True]


def test_a_fall_within_the_intervals_is_none():
    few, many = [0.85, 0.65], [0.75, 0.55]
    assert measured("fall", [0.7, 0.5], few, window=1, max=0.2, by=0.01)[1] == [False, False]
    assert measured("fall", [0.7, 0.5], many, window=1, max=0.2, by=0.01)[1] == [False, True]


def test_what_has_to_hold_is_wrong_from_so_many_values_on():
    assert measured("fall", [0.7, 0.5, 0.5, 0.7, 0.5], window=1, max=0.2, held=2)[1] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert measured("gap", [0.5, 0.9, 0.9], [0.5, 0.5, 0.5], window=1, max=0.2, held=2)[1] == [False, False, True]


def test_no_rise_is_a_share_of_the_way_to_the_top():
    values, is_wrong = measured("no_rise", [0.5, 0.5, 0.6, 0.9], [1, 1, 1, 1], window=1, min=0.3)
    assert values == pytest.approx([0, 0, 0.2, 0.8])
    assert is_wrong == [True, True, True, False]


def test_risen_is_what_is_still_above_the_start():
    values, is_wrong = measured("risen", [0.5, 0.5, 0.6, 0.9, 0.5], [1, 1, 1, 1, 1], window=1, min=0.3)
    assert values == pytest.approx([0, 0, 0.2, 0.8, 0])
    assert is_wrong == [False, False, False, True, False]


def test_near_top_is_wrong_from_the_share_on():
    assert measured("near_top", [0.5, 0.99], [1, 1], window=1, min=0.95)[1] == [False, True]


def test_rises_and_grows():
    line = list(range(1, 31))
    assert measured("rises", line, window=30, max=0.0)[1][-1]
    assert not measured("rises", line[::-1], window=30, max=0.0)[1][-1]
    assert not measured("rises", [1, 2] * 15, window=30, max=0.0)[1][-1]
    assert measured("grows", line, window=20, max=0.5)[1] == [False] * 10 + [True] * 20
    levelling_off = [1 + 9 * (1 - math.exp(-step / 4)) for step in range(30)]
    assert measured("rises", levelling_off, window=30, max=0.0)[1][-1]
    assert not measured("grows", levelling_off, window=30, max=0.1)[1][-1]


def test_growth_below_the_least_is_none():
    line = [0.001 * step for step in range(1, 31)]
    assert not measured("grows", line, window=30, max=0.1, by=0.05)[1][-1]


def test_jumps_are_counted_against_the_median_before():
    column = [1, 1, 1, 1, 4, 1, 1, 4]
    values, is_wrong = measured("jumps", column, window=4, times=3.0, count=0.0)
    assert values == [0, 0, 0, 0, 1, 1, 1, 2]
    assert is_wrong == [False, False, False, False, True, True, True, True]
    assert not any(measured("jumps", column, window=4, times=3.0, count=0.0, least=5.0)[1])


def test_the_first_steps_are_no_jumps():
    assert not any(measured("jumps", [1, 9, 9, 9, 9], window=4, times=3.0, count=0.0)[1])


def test_leap_is_a_multiple_of_the_values_before():
    column = [1] * 8 + [3] * 8
    values, is_wrong = measured("leap", column, window=1, times=2.0)
    assert values[-1] == 3
    assert is_wrong.index(True) == 10  # three of five values are high
    assert not any(measured("leap", column, window=1, times=2.0, min=4.0)[1])


def test_shrunk_is_a_share_of_the_first_values():
    column = [0.4] * 6 + [0.02] * 6
    values, is_wrong = measured("shrunk", column, window=3, min=0.2, below=0.1)
    assert values[-1] == pytest.approx(0.05)
    assert is_wrong.index(True) == 7
    assert not any(measured("shrunk", column, window=3, min=0.2, below=0.01)[1])


def test_sudden_fall_is_told_from_a_slow_one():
    falls = [0.5] * 10 + [0.1] * 4
    assert measured("sudden_fall", falls, window=4, min=0.4, least=0.1)[1][-1]
    assert not any(measured("sudden_fall", falls, window=4, min=0.4, least=0.6)[1])
    slowly = [0.5 - 0.02 * step for step in range(20)]
    assert not any(measured("sudden_fall", slowly, window=4, min=0.4, least=0.1)[1])
    assert not any(measured("sudden_fall", [0.5], window=4, min=0.4)[1])


def test_gap_is_judged_against_the_start_and_a_third_curve():
    values, is_wrong = measured("gap", [0.8, 0.9], [0.7, 0.6], window=1, max=0.2)
    assert values == pytest.approx([0.125, 1 / 3])
    assert is_wrong == [False, True]
    assert measured("gap", [0.8, 0.9], [0.5, 0.5], window=1, max=0.2)[1] == [False, False]  # most of it from the start
    assert measured("gap", [0.5, 0.9], [0.5, 0.5], [0.7, 0.7], window=1, max=0.2)[1] == [False, True]
    assert measured("gap", [0.5, 0.9], [0.5, 0.5], [0.75, 0.75], window=1, max=0.2)[1] == [False, False]


def test_cancels_and_the_mean_over_the_run():
    assert measured("cancels", [-0.3, -0.2], [0.3, 0.1], window=1, max=0.05, each=0.5)[1] == [True, False]
    assert measured("cancels", [-0.7], [0.7], window=1, max=0.05, each=0.5)[1] == [False]
    values, is_wrong = measured("means_cancel", [-0.3, -0.1, 0.5], [0.1, 0.3, 0.0], window=1, max=0.05, each=0.5)
    assert is_wrong == [False, True, False]
    assert values == pytest.approx([0.1, 0.2, 0.4 / 3])
    values, is_wrong = measured("run_mean", [0.6, 1.2, 0.9], window=1, max=0.8)
    assert values == pytest.approx([0.6, 0.9, 0.9])
    assert is_wrong == [False, True, True]


def test_a_rise_within_a_window_is_found():
    values, is_wrong = measured("rise_within", [-0.1] * 8 + [0.5, -0.1, -0.1], window=2, by=0.5)
    assert values[7:] == pytest.approx([0.0, 0.6, 0.6, 0.0])
    assert is_wrong[7:] == [False, True, True, False]
    assert not any(measured("rise_within", [5.0, 0.0, 0.0, 0.4], window=4, by=0.5)[1])  # the start does not count


def test_growth_over_the_first_values_above_0():
    spread = [0.0, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.4]
    values, is_wrong = measured("grown", spread, window=1, times=3.0)
    assert values[-1] == 0.4
    assert is_wrong == [False] * 7 + [True]
    assert not any(measured("grown", [0.0] * 4, window=1, times=3.0)[1])


def test_a_spread_within_the_bounds_of_its_values():
    def is_explained(spread, mean, high):
        zeros = [0.0] * len(spread)
        return measured("within_bounds", spread, mean, zeros, high, window=1, times=3.0)[1][-1]

    rare, usual = [0.01] * 5 + [0.4], [0.3] * 5 + [0.6]
    assert is_explained([0.02] * 5 + [0.46], rare, [1.0] * 6)  # successes were rare, and became usual
    assert not is_explained([0.05] * 5 + [0.3], usual, [1.0] * 6)
    assert not is_explained([0.02] * 5 + [0.46], rare, [1.0] * 5 + [10.0])  # the values have new bounds


def test_few_validations_have_to_stay_below_all_but_the_first():
    def has_fallen(*validations):
        return measured("fall", validations, window=1, max=0.2, held=3.0, sure=6.0)[1][-1]

    assert not has_fallen(0.7, 0.4)
    assert has_fallen(0.7, 0.4, 0.4)
    assert not has_fallen(0.7, 0.65, 0.4)
    assert has_fallen(0.7, 0.5, 0.45, 0.4)
    assert not has_fallen(0.7, 0.2, 0.2, 0.4)  # on its way back
    assert has_fallen(0.7, 0.7, 0.7, 0.2, 0.2, 0.4)


LIMITS = {
    "min": 0.1,
    "max": 0.5,
    "by": 0.01,
    "times": 2.0,
    "count": 0.0,
    "least": 0.0,
    "below": 1.0,
    "each": 1.0,
    "gain": 0.05,
}
COLUMNS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[arrays(np.float64, n, elements=st.floats(allow_nan=False, allow_infinity=False))] * 4)
)


@pytest.mark.one_python("its work is numpy's")
@pytest.mark.parametrize("kind", sorted(KINDS))
@given(columns=COLUMNS, window=st.integers(1, 60))
def test_any_finite_columns_give_as_many_values(kind, columns, window):
    with np.errstate(all="ignore"):
        found = KINDS[kind](columns if kind == "within_bounds" else columns[:2], LIMITS, window)
    assert found.values.shape == found.is_wrong.shape == columns[0].shape
    assert not np.isnan(found.values).any()
