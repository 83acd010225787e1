import math

import numpy as np
import pytest

from rl_metrics.comparison.trends import mann_kendall_z, theil_sen


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
