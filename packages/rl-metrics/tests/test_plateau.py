"""Verdicts on a target, and on runs that stop improving below it."""

import numpy as np
import pytest

from rl_metrics.health import Verdict, judge
from rl_metrics.run_files.history import History
from rl_metrics.targets import TargetOptions

ACCURACY = "val-core/math/acc/mean@1"
LENGTH = "val-aux/math/length/mean@1"
STUCK = [0.1, 0.25, 0.4, 0.4, 0.39, 0.41, 0.4, 0.4, 0.4, 0.4]
"""Rises for 20 steps, then stays for 70."""


def validated(values, name=ACCURACY):
    """Every tenth step is validated."""
    steps = np.arange(0, 10 * len(values))
    column = np.full(len(steps), np.nan)
    column[::10] = values
    return History(steps=steps, times=np.zeros(len(steps)), values={name: column})


def rewarded(values, highest=1.0):
    steps = np.arange(1, len(values) + 1)
    columns = {"critic/score/mean": np.array(values), "critic/score/max": np.full(len(values), highest)}
    return History(steps=steps, times=np.zeros(len(steps)), values=columns)


def rules_found(history, target=None):
    return {one.rule for one in judge(history, target=target, family="policy_gradient").findings}


def test_a_validation_that_is_stuck_far_below_is_a_plateau_with_advice():
    verdict = judge(validated(STUCK), family="policy_gradient")
    (finding,) = [one for one in verdict.findings if one.rule == "plateau"]
    assert finding.evidence[0].text == (
        f"{ACCURACY} is at best 0.41, 5 validations ago it was at best 0.4 (0.55 is good enough)"
    )
    assert any("export --best" in one for one in finding.advice)
    assert finding.since_step == 70


@pytest.mark.parametrize(
    "values",
    [
        [0.1, 0.25, 0.4, 0.43, 0.46, 0.49, 0.52, 0.53, 0.54, 0.545],  # slow, but not stuck
        [0.3, 0.6, 0.8, 0.8, 0.8, 0.81, 0.8, 0.8, 0.8, 0.8],  # good enough
        [0.1, 0.25, 0.4, 0.4, 0.4],  # too early
    ],
)
def test_a_validation_that_improves_or_is_good_enough_is_no_plateau(values):
    assert "plateau" not in rules_found(validated(values))


def test_a_reward_that_is_stuck_below_half_of_the_highest_is_a_plateau():
    rising = [0.1 + 0.01 * step for step in range(30)]
    noise = np.random.default_rng(0).normal(0, 0.01, 100)
    assert "plateau" in rules_found(rewarded(list(np.array(rising + [0.4] * 70) + noise)))
    assert "plateau" not in rules_found(rewarded([*rising, *(0.4 + 0.006 * step for step in range(70))]))
    assert "plateau" not in rules_found(rewarded(rising + [0.4] * 70, highest=0.5))


def test_the_target_decides_what_is_good_enough():
    assert "plateau" in rules_found(validated([0.3, 0.6, *[0.8] * 8]), TargetOptions(value=0.9))
    assert "plateau" not in rules_found(validated(STUCK), TargetOptions(value=0.35))
    falls = TargetOptions(metric=LENGTH, value=50, lower_is_better=True)
    assert "plateau" in rules_found(validated([200, 100, *[80] * 8], LENGTH), falls)
    assert "plateau" not in rules_found(validated([200, 100, 90, 80, 75, 70, 65, 60, 55, 52], LENGTH), falls)


def stuck_with(reward):
    """A stuck validation beside a training reward."""
    history, score = validated(STUCK), np.concatenate([[np.nan], reward])
    columns = {"critic/score/mean": score, "critic/score/max": np.where(np.isnan(score), np.nan, 1.0)}
    return History(steps=history.steps, times=history.times, values=history.values | columns)


@pytest.mark.parametrize("target", [None, TargetOptions(value=0.55)])
@pytest.mark.parametrize("reward", [np.linspace(0.1, 0.6, 99), np.linspace(0.5, 1.0, 99)])
def test_a_stuck_validation_is_not_excused_by_the_training_reward(target, reward):
    assert "plateau" in rules_found(stuck_with(reward), target)


def test_a_stuck_reward_is_found_beside_a_target_without_validation():
    reward = [0.1 + 0.01 * step for step in range(30)] + [0.4] * 70
    assert "plateau" in rules_found(rewarded(reward), TargetOptions(value=0.55))


def test_a_check_counts_the_steps_that_its_metric_needs():
    def reading(history):
        return {one.rule: one.reading for one in judge(history, family="policy_gradient").checks}["plateau"]

    assert reading(rewarded([0.4] * 50)) == "50 of the 60 steps needed"
    assert reading(validated(STUCK[:4])) == "4 of the 6 steps needed"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (TargetOptions(value=0.4), "reached at step 20 (0.4); best 0.41 at step 50"),
        (TargetOptions(value=0.55), "not reached; best 0.41 at step 50, newest 0.4 at step 90"),
        (TargetOptions(metric=LENGTH, value=9), "not judged, because no validation reports it yet"),
    ],
)
def test_the_verdict_says_whether_the_target_is_reached(target, text):
    verdict = judge(validated(STUCK), target=target)
    assert text in verdict.target.text
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_without_a_value_there_is_no_target():
    assert judge(validated(STUCK), target=TargetOptions(metric=ACCURACY)).target is None
