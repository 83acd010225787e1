"""A run's outcome, for each way to record and end a run."""

import json
import math

import pytest

from rl_metrics.comparison.intervals import mean_of_draws, wilson
from rl_metrics.report.outcome import describe_outcome
from rl_metrics.run_files.run_record import open_run

SCORE, VALIDATION = "critic/score/mean", "val-core/math/acc/mean@1"
SETTINGS = """
[policy]
path = "models/small"
[prompts]
train = "train.parquet"
[reward]
function = "reward.py:reward"
[algorithm]
advantage = "grpo"
policy_loss = "ppo_clip"
[rollout]
prompts_per_step = 4
group_size = 8
[trainer]
steps = 20
"""
BOUNDED = {"critic/score/min": 0.0, "critic/score/max": 1.0, "rollout/num_groups": 64.0}


def outcome_of(folder, rows, *, events=(), settings="", summary=None):
    lines = [{"step": step, "time": 10.0 * step, **row} for step, row in enumerate(rows, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events))
    (folder / "settings.toml").write_text(settings)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return describe_outcome(open_run(folder))


def rising(count, **more):
    return [{SCORE: 0.5 + 0.4 * step / count, **BOUNDED, **more} for step in range(count)]


FINISHED = ({"event": "run_started"}, {"event": "run_finished"})


def test_a_finished_run(tmp_path):
    rows = [row | {VALIDATION: 0.3 + step / 40, f"{VALIDATION}/ci_low": 0.2, f"{VALIDATION}/ci_high": 0.35 + step / 40}
            for step, row in enumerate(rising(20))]  # fmt: skip
    summary = {"wall_s": 99.0, "num_samples": 640, "samples_per_s": 7.5}
    found = outcome_of(tmp_path, rows, events=FINISHED, settings=SETTINGS, summary=summary)
    assert found["sentence"] == (
        "Validation on math (acc) did not clearly change (0.3 to 0.775) and the training reward rose from 0.54 to 0.84 "
        "in 20 steps."
    )
    assert found["trained"] == [
        ("model", "models/small"),
        ("method", "GRPO, loss ppo_clip"),
        ("data", "train.parquet"),
        ("reward", "reward.py:reward"),
        ("a step", "4 prompts, 8 responses each"),
        ("training", "synchronous"),
    ]
    assert (found["wall_s"], found["num_samples"], found["samples_per_s"]) == (99.0, 640, 7.5)
    reward, validation = found["figures"]
    assert (reward["metric"], validation["metric"]) == (SCORE, VALIDATION)
    assert reward["first"]["steps"] == (1, 5)
    assert reward["last"]["steps"] == (16, 20)
    assert reward["still"] == 1
    assert "Wilson" in reward["last"]["how"]
    assert "bootstrap" in validation["last"]["how"]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (({"event": "run_started"},), "Not finished, at step 8 of 20; the training reward rose from"),
        (({"event": "run_started"}, {"event": "run_stopped", "signal": 15}), "It was stopped after step 8 of 20; the"),
        (
            ({"event": "run_started"}, {"event": "run_failed", "error": "RoleDiedError: engine 1 died."}),
            "The run failed after step 8 of 20: RoleDiedError: engine 1 died; the training reward rose from 0.525",
        ),
        (
            ({"event": "run_failed", "error": "x"}, {"event": "run_resumed"}, {"event": "run_finished"}),
            "The training reward rose from 0.525 to 0.825 in 8 of 20 steps.",
        ),
        (
            ({"event": "run_imported", "trainer": "verl"},),
            "The training reward rose from 0.525 to 0.825 in 8 of 20 steps.",
        ),
        ((), "The training reward rose from 0.525 to 0.825 in 8 of 20 steps."),
    ],
)
def test_each_way_to_end(tmp_path, events, said):
    assert outcome_of(tmp_path, rising(8), events=events, settings=SETTINGS)["sentence"].startswith(said)


@pytest.mark.parametrize(
    ("rows", "events", "said"),
    [
        ([], (), "No step has finished yet."),
        ([], ({"event": "run_failed", "error": "no GPU"},), "The run failed before its first step: no GPU."),
        (
            [{SCORE: 0.5}],
            FINISHED,
            "The training reward is 0.5 at step 1, and one value does not show whether it learns.",
        ),
        ([{"a": 1.0}], (), "No reward, loss or validation was recorded in 1 step."),
        (
            [{"other/loss": value} for value in (3.0, 2.0, 2.0, 1.0)],
            (),
            "The loss went from 3 to 1 (without an interval, it may be chance) in 4 steps.",
        ),
        (
            [*rising(8), {VALIDATION: 0.4}],
            FINISHED,
            "Validation on math (acc) is 0.4 at step 9 and the training reward rose from 0.525 to 0.825 in 9 steps.",
        ),
        ([{SCORE: 0.0}] * 9, (), "The training reward stayed at 0 in 9 steps."),
    ],
)
def test_what_little_was_recorded_is_said(tmp_path, rows, events, said):
    assert outcome_of(tmp_path, rows, events=events)["sentence"] == said


def test_an_imitation_of_texts_has_no_teacher(tmp_path):
    settings = SETTINGS + '[distillation]\nloss = "nll"\ntexts = "solution"\n'
    found = outcome_of(tmp_path, [{"actor/distillation/loss": 1.0 / step} for step in (1, 2)], settings=settings)
    assert ("method", "supervised, imitates the texts of the column solution") in found["trained"]
    assert found["sentence"] == (
        "The cross entropy of the texts went from 1 to 0.5 (without an interval, it may be chance) in 2 of 20 steps."
    )


def test_a_distillation_is_summarized_with_its_divergence(tmp_path):
    settings = SETTINGS + '[distillation]\nloss = "reverse_kl"\n[distillation.teachers.adder]\nmodel = "big"\n'
    rows = [{"actor/distillation/loss": 1.0 / step, VALIDATION: 0.1 * step} for step in range(1, 9)]
    found = outcome_of(tmp_path, rows, events=FINISHED, settings=settings)
    assert ("method", "distillation from adder, loss reverse_kl") in found["trained"]
    assert found["sentence"].startswith(
        "Validation on math (acc) went from 0.1 to 0.8 (without an interval, it may be chance) and the divergence from "
        "the teacher went from 0.75"
    )
    divergence = found["figures"][0]
    assert not divergence["is_up_better"]
    assert divergence["last"]["how"].startswith("none")  # each end has only two steps


def test_an_asynchronous_run(tmp_path):
    found = outcome_of(tmp_path, rising(4), settings=SETTINGS + "[schedule]\nmax_staleness = 2\n")
    assert ("training", "asynchronous, staleness at most 2") in found["trained"]


def test_replayed_steps_are_counted(tmp_path):
    rows = rising(1) + rising(2, **{"rollout/replayed": 1.0}) + rising(1, **{"rollout/replayed": 0.0})
    found = outcome_of(tmp_path, rows, settings=SETTINGS + '[rollout_cache]\ndirectory = "skip-cache"\n')
    assert ("rollouts", "2 of 4 steps replayed from skip-cache") in found["trained"]


def test_an_import_says_from_where(tmp_path):
    found = outcome_of(tmp_path, rising(4), events=[{"event": "run_imported", "trainer": "trl"}])
    assert (found["state"], found["trained"]) == ("imported", [("imported from", "trl")])


def test_rewards_beyond_0_and_1_have_an_interval_of_their_steps(tmp_path):
    rows = [
        {SCORE: 10.0 + value, **BOUNDED, "critic/score/max": 20.0} for value in (0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1)
    ]
    (reward,) = outcome_of(tmp_path, rows)["figures"]
    assert reward["last"]["how"].startswith("Student's t")
    low, high = reward["first"]["interval"]["low"], reward["first"]["interval"]["high"]
    assert (low, high) == pytest.approx((11 - 4.3027 / math.sqrt(3), 11 + 4.3027 / math.sqrt(3)), rel=1e-3)


def test_few_steps_claim_no_rise_and_say_why_there_is_no_interval(tmp_path):
    rows = [{SCORE: value, **BOUNDED, "critic/score/min": -1.0} for value in (0.219, 0.2, 0.25)]
    found = outcome_of(tmp_path, rows)
    assert found["sentence"] == (
        "The training reward went from 0.219 to 0.25 (without an interval, it may be chance) in 3 steps."
    )
    assert found["figures"][0]["last"]["how"] == (
        "none, because each end needs three steps, which it has in a run of twelve"
    )


def test_a_source_that_fell_is_not_hidden_by_one_that_rose(tmp_path):
    def measured(source, value):
        name = f"val-core/{source}/acc/mean@1"
        return {name: value, f"{name}/ci_low": value - 0.02, f"{name}/ci_high": value + 0.02}

    rows = [measured("a", 0.3) | measured("b", 0.8) | measured("c", 0.1), measured("a", 0.5) | measured("b", 0.6)]
    rows[1] |= measured("c", 0.3)
    assert outcome_of(tmp_path, rows)["sentence"] == (
        "Validation on a (acc) rose from 0.3 to 0.5 and validation on b (acc) fell from 0.8 to 0.6 in 2 steps."
    )


def test_times_are_estimated_without_a_summary(tmp_path):
    rows = [{"timing_s/step": 2.0, "rollout/num_trajectories": 16.0}] * 5
    found = outcome_of(tmp_path, rows)
    assert (found["wall_s"], found["num_samples"], found["samples_per_s"], found["step_s"]) == (40.0, 80.0, 8.0, 2.0)


@pytest.mark.parametrize(
    "settings",
    [
        'policy = "flat"\ndistillation = 3\n',
        "[distillation]\nteachers = 3\n",
        "[policy]\npath = [1]\n",
        "[trainer]\nsteps = -1\n",
        "broken",
    ],
)
def test_settings_of_another_shape_stop_nothing(tmp_path, settings):
    rows = [
        {SCORE: value, "timing_s/step": value} for value in (1e308, -1e308, 1e308, math.inf, 1e308, 0.0, 1e308, 1e308)
    ]
    summary = {"wall_s": "x", "num_samples": None, "samples_per_s": 10**400}
    assert outcome_of(tmp_path, rows, settings=settings, summary=summary)["sentence"]


def test_wilson_intervals_equal_those_by_hand():
    for share, count, expected in (
        (0.5, 100, (0.40383, 0.59617)),
        (0.0, 10, (0.0, 0.27753)),
        (1.0, 10, (0.72247, 1.0)),
    ):
        found = wilson(share, count)
        assert (found.low, found.high) == pytest.approx(expected, abs=2e-5)


def test_three_draws_by_hand():
    import numpy as np

    found = mean_of_draws(np.array([1.0, 2.0, 3.0]))
    assert (found.low, found.high) == pytest.approx((2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), rel=1e-4)
    assert mean_of_draws(np.array([1.0, 2.0])) != found
    assert not mean_of_draws(np.array([1.0, 2.0])).is_known
