"""Running statistics."""

import numpy as np

from rl_metrics.health.checks import running_median


def test_the_running_median_begins_with_what_there_is():
    assert running_median(np.array([4.0, 2.0, 9.0, 1.0, 1.0]), 3).tolist() == [4.0, 3.0, 4.0, 2.0, 1.0]
    assert running_median(np.array([4.0, 2.0]), 5).tolist() == [4.0, 3.0]
