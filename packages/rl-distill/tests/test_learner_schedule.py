"""Warm-up and decay."""

import math

import pytest

from rl_core.errors import NotReadyError, SettingsError
from rl_distill.options import AdamOptions, LearnerOptions
from rl_distill.stepping import adam_at, check_open, check_temperature, clip_scale, learning_rate_at


def test_rate_is_constant_without_schedule():
    options = LearnerOptions(learning_rate=0.5)

    assert [learning_rate_at(step, options) for step in (1, 2, 1000)] == [0.5, 0.5, 0.5]


def test_learning_rate_rises_in_the_warmup_then_decays():
    options = LearnerOptions(learning_rate=1.0, warmup_steps=2, decay_steps=6)

    rates = [learning_rate_at(step, options) for step in range(1, 9)]

    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_decay_without_warmup_starts_at_the_peak():
    options = LearnerOptions(learning_rate=1.0, decay_steps=4)

    assert [learning_rate_at(step, options) for step in range(1, 6)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_decay_ends_at_the_lowest_rate():
    options = LearnerOptions(learning_rate=1.0, warmup_steps=1, decay_steps=5, decay="cosine", min_learning_rate=0.1)

    rates = [learning_rate_at(step, options) for step in range(1, 8)]

    assert rates == pytest.approx([1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1, 0.1], abs=1e-6)


def test_linear_decay_ends_at_the_lowest_rate():
    options = LearnerOptions(learning_rate=1.0, decay_steps=2, min_learning_rate=0.5)

    assert [learning_rate_at(step, options) for step in (1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.5]


def test_adam_gets_every_option_and_the_rate_of_the_step():
    given = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "clip_grad": 2.0}
    options = LearnerOptions(learning_rate=1.0, warmup_steps=4, **given)

    assert adam_at(3, options) == AdamOptions(learning_rate=0.75, **given)


@pytest.mark.parametrize(
    ("grad_norm", "clip_grad", "expected"),
    [
        (3.0, 1.5, 1.5 / 3.000001),
        (1.0, 2.0, 1.0),
        (0.0, 1e-7, 0.1),
        (0.0, 1.0, 1.0),
        (9.0, 0.0, 1.0),
        (4.0, 0.5, 0.125),
    ],
)
def test_gradients_are_scaled_down_to_the_limit(grad_norm: float, clip_grad: float, expected: float):
    assert clip_scale(grad_norm, clip_grad) == pytest.approx(expected, rel=1e-6)


def test_a_closed_learner_and_a_temperature_that_is_not_above_zero_are_refused():
    assert check_open(options := LearnerOptions()) is options
    with pytest.raises(NotReadyError, match="the learner was closed"):
        check_open(None)
    check_temperature(1e-6)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(SettingsError, match=f"temperature must be above 0; found {temperature}"):
            check_temperature(temperature)
