"""A target for validation: its value, the best validation, and whether it is reached."""

import numpy as np
import pytest

from rl_core.errors import SettingsError
from rl_metrics.run_files.history import History
from rl_metrics.targets import (
    EXACT,
    TargetOptions,
    Validated,
    best_of,
    best_to_keep,
    num_since_best,
    target_of,
    validations_of,
)

MATH, CODE = "val-core/math/acc/mean@1", "val-core/code/acc/mean@1"
LENGTH = "val-aux/math/length/mean@1"


def validations(*values, exact=()):
    return [
        Validated(step=10 * number, value=value, is_exact=number not in exact) for number, value in enumerate(values)
    ]


def test_the_main_metric_is_the_mean_over_sources():
    assert TargetOptions().value_in({MATH: 0.25, CODE: 0.75, LENGTH: 9.0}) == 0.5
    assert TargetOptions(metric=MATH).value_in({MATH: 0.25, CODE: 0.75}) == 0.25
    assert TargetOptions().value_in({"actor/loss": 1.0}) is None
    assert TargetOptions(metric=MATH).value_in({MATH: float("nan")}) is None


def test_validations_of_a_history_are_the_steps_that_have_them():
    nan = float("nan")
    history = History(
        steps=np.array([0, 5, 10, 15]),
        times=np.zeros(4),
        values={
            MATH: np.array([0.2, nan, 0.4, nan]),
            CODE: np.array([0.4, nan, nan, nan]),
            EXACT: np.array([nan, nan, 0.0, nan]),
        },
    )
    assert validations_of(history, TargetOptions()) == (
        Validated(step=0, value=pytest.approx(0.3)),
        Validated(step=10, value=0.4, is_exact=False),
    )
    assert validations_of(history, TargetOptions(metric=LENGTH)) == ()


def test_the_best_is_the_first_of_equal_ones():
    assert best_of(validations(0.1, 0.5, 0.5, 0.4), TargetOptions()).step == 10
    assert best_of(validations(0.1, 0.5, 0.05), TargetOptions(metric=LENGTH, lower_is_better=True)).step == 20
    assert best_of([], TargetOptions()) is None


def test_the_best_to_keep_was_trained_and_answered_by_its_own_weights():
    found = best_to_keep(validations(0.9, 0.3, 0.6, 0.5, exact=[2]), TargetOptions())
    assert (found.step, found.value) == (30, 0.5)


def test_validations_since_the_best_are_counted():
    assert num_since_best(validations(0.1, 0.5, 0.5, 0.4), TargetOptions()) == 2
    assert num_since_best(validations(0.1, 0.5), TargetOptions()) == 0
    assert num_since_best([], TargetOptions()) == 0


@pytest.mark.parametrize(
    ("target", "value", "is_reached"),
    [
        (TargetOptions(value=0.55), 0.55, True),
        (TargetOptions(value=0.55), 0.54, False),
        (TargetOptions(metric=LENGTH, value=10, lower_is_better=True), 9.0, True),
        (TargetOptions(metric=LENGTH, value=10, lower_is_better=True), 11.0, False),
        (TargetOptions(), 1.0, False),
    ],
)
def test_a_target_is_reached_at_its_value(target, value, is_reached):
    assert target.is_reached(value) is is_reached


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"metric": "reward/acc/mean", "value": 0.5}, "metric of validation"),
        ({"stop": True}, "needs a value"),
        ({"value": 0.5, "lower_is_better": True}, "needs a metric"),
    ],
)
def test_impossible_targets_are_refused(options, word):
    assert word in " ".join(TargetOptions(**options).problems())


def test_a_value_is_finite():
    with pytest.raises(SettingsError, match="value of TargetOptions must be a finite number or None; found inf"):
        TargetOptions(value=float("inf"))


def test_a_metric_that_validation_lacks_is_refused_with_the_nearest():
    with pytest.raises(SettingsError, match=f"Did you mean '{MATH}'"):
        TargetOptions(metric="val-core/math/acc/mean@8").require_in({MATH: 0.5})
    TargetOptions(metric="val-core/math/acc/mean@8").require_in({})  # every session failed
    TargetOptions(metric=MATH).require_in({MATH: 0.5})


def test_recorded_settings_give_the_target_back():
    target = TargetOptions(metric=MATH, value=0.5, stop=True)
    assert target_of({"trainer": {"target": {"metric": MATH, "value": 0.5, "stop": True}}}) == target
    assert target_of({"trainer": {"target": "x"}}) == target_of({}) == TargetOptions()
