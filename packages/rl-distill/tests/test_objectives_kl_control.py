import math

import pytest

from rl_core.errors import CheckpointError, SettingsError
from rl_distill.objectives import AdaptiveKL


def test_adapted_coefficients_equal_literals():
    control = AdaptiveKL(coefficient=0.1, target=0.02, horizon=1000)
    # 10 % above the target for a tenth of the horizon: the coefficient rises by 1 %.
    assert control.adapted(0.022, num_trajectories=100).coefficient == pytest.approx(0.101)
    # Larger deviations count as 20 %.
    assert control.adapted(5.0, num_trajectories=100).coefficient == pytest.approx(0.102)
    assert control.adapted(-5.0, num_trajectories=100).coefficient == pytest.approx(0.098)
    assert control.adapted(0.02, num_trajectories=100) == control


def test_a_batch_larger_than_the_horizon_never_turns_the_sign():
    control = AdaptiveKL(coefficient=0.1, target=0.02, horizon=10)
    assert control.adapted(0.0, num_trajectories=1000).coefficient == pytest.approx(0.08)


def test_without_a_target_it_stays():
    control = AdaptiveKL(coefficient=0.1)
    assert control.adapted(5.0, num_trajectories=100) is control
    assert control.restored({"coefficient": 0.7}) is control, "the user may have changed it"


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_what_was_not_measured_changes_nothing(kl):
    control = AdaptiveKL(coefficient=0.1, target=0.02)
    assert control.adapted(kl, num_trajectories=100) is control


def test_state_goes_on():
    control = AdaptiveKL(coefficient=0.1, target=0.02, horizon=100)
    later = control.adapted(1.0, num_trajectories=50)
    assert control.restored(later.state()) == later


@pytest.mark.parametrize("state", [{}, {"coefficient": -1.0}, {"coefficient": "x"}, {"coefficient": math.nan}])
def test_a_broken_state_is_refused(state):
    with pytest.raises(CheckpointError, match="coefficient above 0"):
        AdaptiveKL(coefficient=0.1, target=0.02).restored(state)


def test_a_batch_of_less_than_nothing_is_refused():
    with pytest.raises(
        SettingsError, match="num_trajectories of adapted must be a whole number of at least 0; found -5"
    ):
        AdaptiveKL(coefficient=0.1, target=0.02).adapted(0.5, num_trajectories=-5)


@pytest.mark.parametrize(
    "options",
    [
        {"coefficient": -0.1},
        {"coefficient": math.nan},
        {"coefficient": math.inf},
        {"coefficient": "0.1"},
        {"coefficient": 0.0, "target": 0.1},
        {"coefficient": 0.1, "target": 0.0},
        {"coefficient": 0.1, "target": math.nan},
        {"coefficient": 0.1, "target": math.inf},
        {"coefficient": 0.1, "target": 0.1, "horizon": 0},
        {"coefficient": 0.1, "target": 0.1, "horizon": math.nan},
        {"coefficient": 0.1, "target": 0.1, "horizon": 2.5},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(SettingsError, match=r"of (AdaptiveKL|the KL control) must be .*; found "):
        AdaptiveKL(**options)
