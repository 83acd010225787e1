"""Sessions whose reward fails are left out and counted; a run in which all fail is a failed run."""

from pathlib import Path

import pytest
from tiny_run import GROUP_SIZE, REWARDS_BEFORE_STEP_1, REWARDS_PER_STEP, TinyRun, make_tiny_run, train_here

from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import MetricRow, read_metrics

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
    """Train two steps with a reward that fails on some calls of training, counted from 0."""
    (run.folder / "reward.py").write_text(REWARD.format(first=REWARDS_BEFORE_STEP_1, fails=fails))
    return train_here(run, trainer__steps=2, trainer__validate_every=0, **settings)


def steps_of(run: TinyRun) -> list[MetricRow]:
    return read_metrics(run.run_folder / "metrics.jsonl")[1:]


def test_failed_sessions_are_counted_and_left_out(run: TinyRun) -> None:
    assert train_with(run, "call % 8 == 3") == 0
    for row in steps_of(run):
        assert row.metrics["rollout/failed_sessions"] == 2
        assert row.metrics["rollout/num_groups"] == 4
        assert row.metrics["rollout/num_trajectories"] == REWARDS_PER_STEP - 2


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
    last = read_events(run.run_folder / "events.jsonl")[-1]
    assert (last["event"], last["step"]) == ("run_failed", 1)
