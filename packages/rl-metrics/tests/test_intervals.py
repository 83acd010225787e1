import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics.comparison.intervals import (
    MIN_STEPS,
    Interval,
    difference_of_estimates,
    difference_over_runs,
    difference_over_steps,
    mann_kendall_z,
    mean_over_steps,
    t_quantile,
    theil_sen,
)

WAVE = np.cos(math.pi * (np.arange(10) + 0.5) / 10)


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # from published tables
    [
        (1, 12.7062047),
        (2, 4.3026527),
        (3, 3.1824463),
        (4, 2.7764451),
        (10, 2.2281389),
        (29, 2.0452296),
        (30, 2.0422725),
        (100, 1.9839715),
        (1000, 1.9623391),
        (math.inf, 1.959964),
    ],
)
def test_quantiles_of_students_t(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, rel=2e-6)


@pytest.mark.parametrize("freedom", [1.0, 1.3, 2.9411765, 7.7, 31.0, 250.0])
def test_between_quantiles_lies_what_they_say(freedom):
    ends = np.linspace(0, t_quantile(freedom), 200_001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = scale * (1 + ends**2 / freedom) ** (-(freedom + 1) / 2)
    assert 2 * np.trapezoid(density, ends) == pytest.approx(0.95, abs=2e-6)


@given(st.floats(1, 200), st.floats(1.01, 2))
def test_quantiles_fall_with_more_degrees_of_freedom(freedom, factor):
    assert t_quantile(freedom) > t_quantile(freedom * factor) > 1.9599


def test_a_series_by_hand():
    # two waves with coefficients 3 * 10 / 2 and 0; variance (15**2 + 0) / 2 * 2 / 10**2 = 1.5**2; t with 2 degrees
    interval = mean_over_steps(7 + 3 * WAVE)
    assert interval.low == pytest.approx(7 - 4.3026527 * 1.5, rel=1e-6)
    assert interval.high == pytest.approx(7 + 4.3026527 * 1.5, rel=1e-6)


def test_two_series_by_hand():
    # variances 1.5**2, 0.5**2 with 2 degrees; sum 2.5 with 2.5**2 / (2.25**2 / 2 + 0.25**2 / 2) = 2.4390244 degrees
    interval = difference_over_steps(3 * WAVE, 10 + WAVE)
    half = t_quantile(2.4390244) * math.sqrt(2.5)
    assert (interval.low, interval.high) == pytest.approx((10 - half, 10 + half), rel=1e-6)


def test_too_few_steps_say_nothing():
    assert not mean_over_steps(np.arange(MIN_STEPS - 1.0)).is_known
    assert mean_over_steps(np.arange(float(MIN_STEPS))).is_known
    assert not difference_over_steps(np.arange(50.0), np.arange(3.0)).is_known


def test_a_constant_series_is_certain():
    interval = mean_over_steps(np.full(20, 0.5))
    assert (interval.low, interval.high) == (0.5, 0.5)
    interval = difference_over_steps(np.full(20, 0.5), np.full(30, 0.75))
    assert (interval.low, interval.high) == (0.25, 0.25)


def remembering(count, memory, num_steps):
    """Return [count, num_steps] series: each value is `memory` times the previous one, plus noise."""
    noise = np.random.default_rng(0).normal(size=(count, num_steps + 200))
    values = np.zeros_like(noise)
    for step in range(1, noise.shape[1]):
        values[:, step] = memory * values[:, step - 1] + noise[:, step]
    return values[:, 200:]


@pytest.mark.parametrize(("memory", "num_steps", "least"), [(0.0, 20, 0.93), (0.5, 50, 0.92), (0.9, 200, 0.86)])
def test_intervals_of_series_that_remember_hold_about_as_often_as_they_say(memory, num_steps, least):
    series = remembering(400, memory, num_steps)
    share = np.mean([mean_over_steps(one).contains(0.0) for one in series])
    assert least <= share <= 0.98
    naive = 1.96 * series.std(axis=1) / math.sqrt(num_steps)
    if memory:
        assert np.mean(np.abs(series.mean(axis=1)) < naive) < share - 0.1


def test_estimates_with_intervals_by_hand():
    interval = difference_of_estimates(0.5, Interval(0.4, 0.7), 0.8, Interval(0.7, 0.85))
    assert interval.low == pytest.approx(0.3 - math.sqrt(0.1**2 + 0.2**2))
    assert interval.high == pytest.approx(0.3 + math.sqrt(0.05**2 + 0.1**2))


def test_several_runs_by_hand():
    # variances of the means 1 / 3, 4 / 3; (5 / 3)**2 / ((1 / 3)**2 / 2 + (4 / 3)**2 / 2) = 2.9411765 degrees of freedom
    interval = difference_over_runs(np.array([1.0, 2.0, 3.0]), np.array([5.0, 7.0, 9.0]))
    half = t_quantile(2.9411765) * math.sqrt(5 / 3)
    assert (interval.low, interval.high) == pytest.approx((5 - half, 5 + half), rel=1e-5)


def test_one_run_against_three_by_hand():
    interval = difference_over_runs(np.array([4.0]), np.array([1.0, 2.0, 3.0]))
    half = 4.3026527 * math.sqrt(2 / 2 * (1 + 1 / 3))
    assert (interval.low, interval.high) == pytest.approx((-2 - half, -2 + half), rel=1e-6)


def test_runs_that_say_nothing():
    one = np.array([1.0])
    assert not difference_over_runs(one, one).is_known
    assert not difference_over_runs(one, np.zeros(0)).is_known
    interval = difference_over_runs(np.array([1.0, 1.0]), np.array([2.0, 2.0]))
    assert (interval.low, interval.high) == (1.0, 1.0)


def test_what_an_interval_says():
    assert Interval(-1.0, 2.0).contains(2.0)
    assert not Interval(-1.0, 2.0).contains(2.1)
    assert not Interval(math.nan, 2.0).is_known
    assert not Interval(math.nan, math.nan).contains(0.0)


def test_theil_sen_does_not_follow_an_outlier():
    assert theil_sen(np.arange(5.0), np.array([0.0, 1.0, 2.0, 3.0, 100.0])) == 1.0
    assert theil_sen(np.array([1.0, 3.0, 11.0]), np.array([0.0, 4.0, 20.0])) == 2.0
    assert theil_sen(np.array([1.0]), np.array([5.0])) == 0.0


def test_mann_kendall_of_five_rising_values():
    # All 10 pairs rise: (10 - 1) / sqrt(5 * 4 * 15 / 18)
    assert mann_kendall_z(np.arange(5.0)) == pytest.approx(9 / math.sqrt(300 / 18))
    assert mann_kendall_z(np.ones(5)) == 0.0
    assert mann_kendall_z(-np.arange(5.0)) == pytest.approx(-9 / math.sqrt(300 / 18))


def test_mann_kendall_counts_ties():
    # 5 of 6 pairs rise, one is a tie: (5 - 1) / sqrt((4 * 3 * 13 - 2 * 1 * 9) / 18)
    assert mann_kendall_z(np.array([1.0, 2.0, 2.0, 3.0])) == pytest.approx(4 / math.sqrt(138 / 18))
