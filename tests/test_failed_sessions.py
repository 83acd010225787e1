"""Sessions with a failed reward are excluded and counted; a run fails if all sessions of a step fail."""

import math
from pathlib import Path

import pytest
from async_runs import train_async_here
from tiny_run import GROUP_SIZE, REWARDS_BEFORE_STEP_1, REWARDS_PER_STEP, TinyRun, make_tiny_run, train_here

from rl_metrics.health.judging import judge_run
from rl_metrics.run_files.events import read_events
from rl_metrics.run_files.rollout_log import read_rollouts
from rl_metrics.run_files.run_record import open_run
from rl_metrics.trackers.jsonl import MetricRow, read_histograms, read_metrics

REWARD = """
from rl_rollout.rewards import quick

count = 0

@quick
def reward(sample):
    global count
    count += 1
    call = count - {first} - 1
    if call >= 0 and ({fails}):
        raise ValueError("no verdict")
    return sum(character in "02468" for character in sample.response_text) / 8
"""


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return make_tiny_run(tmp_path)


def train_with(run: TinyRun, fails: str, **settings: object) -> int:
    """Train two steps. The reward raises where the expression `fails` is true of `call`, counted from 0 in training."""
    (run.folder / "reward.py").write_text(REWARD.format(first=REWARDS_BEFORE_STEP_1, fails=fails))
    return train_here(run, trainer__steps=2, trainer__validate_every=0, **settings)


def steps_of(run: TinyRun) -> list[MetricRow]:
    return read_metrics(run.run_folder / "metrics.jsonl")[1:]


REASON = "raised ValueError: no verdict (reward.py, line 12, in reward)"


def test_failed_sessions_are_counted_left_out_and_told_with_their_reason(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_with(run, "call % 8 == 3") == 0
    for row in steps_of(run):
        assert row.metrics["rollout/failed_sessions"] == row.metrics["rollout/failed_rewards"] == 2
        assert row.metrics["rollout/num_groups"] == 4
        assert row.metrics["rollout/num_trajectories"] == REWARDS_PER_STEP - 2
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in told] == ["step 1", "step 2", "step 2 (validation)", "step 2 (test)"]
    assert told[0].startswith(f"step 1: 2 of {REWARDS_PER_STEP} sessions failed, 2 of them in their reward")
    assert REASON in told[0]
    events = [event for event in read_events(run.run_folder / "events.jsonl") if event["event"] == "sessions_failed"]
    assert [event["during"] for event in events] == ["training", "training", "validation", "test"]
    assert [(event["step"], event["num_failed"], event["num_rewards"]) for event in events[:2]] == [
        (1, 2, 2),
        (2, 2, 2),
    ]
    assert all(REASON in event["error"] for event in events)
    failed = [row for row in read_rollouts(run.run_folder / "rollouts.jsonl") if row.failure is not None]
    assert [row.step for row in failed] == [1, 1, 2, 2]
    assert all(REASON in str(row.failure) and row.response and math.isnan(row.reward) for row in failed)
    (finding,) = [one for one in judge_run(open_run(run.run_folder)).findings if one.rule == "failed_rewards"]
    assert any(REASON in one.text for one in finding.evidence)
    for row in read_histograms(run.run_folder / "histograms.jsonl"):  # the time of a failed reward counts too
        assert row.histograms["distribution/reward_s"].count == REWARDS_PER_STEP
    assert "failed_rewards" in (run.run_folder / "health.json").read_text()
    assert REASON in (run.run_folder / "health.json").read_text()


def test_the_asynchronous_trainer_tells_them_too(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    (run.folder / "reward.py").write_text(REWARD.format(first=REWARDS_BEFORE_STEP_1, fails="call % 8 == 3"))
    assert train_async_here(run, trainer__steps=2, trainer__validate_every=0, schedule__max_staleness=0) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert told[0].startswith(f"step 1: 2 of {REWARDS_PER_STEP} sessions failed, 2 of them in their reward")
    assert [line.partition(":")[0] for line in told] == ["step 1", "step 2", "step 2 (validation)", "step 2 (test)"]
    failed = [row for row in read_rollouts(run.run_folder / "rollouts.jsonl") if row.failure is not None]
    assert [row.step for row in failed] == [1, 1, 2, 2]
    assert all(REASON in str(row.failure) for row in failed)
    assert REASON in (run.run_folder / "health.json").read_text()


def test_rewards_that_count_0_as_they_failed_are_told_too(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_with(run, "call % 8 == 3", reward__on_failure="zero") == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert told[0].startswith(f"step 1: the rewards of 2 of {REWARDS_PER_STEP} sessions failed and count as 0")
    assert REASON in told[0]
    assert [row.metrics["rollout/failed_rewards"] for row in steps_of(run)] == [2, 2]


@pytest.mark.parametrize("num_failed", [1, 2, 3])
def test_groups_that_failed_whole_leave_fewer_minibatches(run: TinyRun, num_failed: int) -> None:
    settings = {"algorithm__old_logprobs": "recompute", "trainer__minibatches": 2}
    assert train_with(run, f"call % {REWARDS_PER_STEP} < {num_failed * GROUP_SIZE}", **settings) == 0
    for row in steps_of(run):
        assert row.metrics["rollout/num_groups"] == 4 - num_failed
        assert row.metrics["rollout/num_trajectories"] == REWARDS_PER_STEP - num_failed * GROUP_SIZE
        assert row.metrics["actor/grad_norm"] > 0


def test_a_step_in_which_all_fail_ends_the_run(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_with(run, f"call >= {REWARDS_PER_STEP}", trainer__checkpoint_every=1) == 1
    said = capsys.readouterr().err
    assert f"all {REWARDS_PER_STEP} sessions failed; the first: " in said
    assert "reward.py:reward" in said
    assert "raised ValueError: no verdict" in said
    assert [row.step for row in steps_of(run)] == [1]
    failed = [row for row in read_rollouts(run.run_folder / "rollouts.jsonl") if row.failure is not None]
    assert [row.step for row in failed] == [2] * 4
    last = read_events(run.run_folder / "events.jsonl")[-1]
    assert (last["event"], last["step"]) == ("run_failed", 1)
