"""ReMax in both trainers: the greedy session's reward reaches the advantages, also from a cache and after a resume."""

from pathlib import Path
from typing import Any

import pytest
from async_runs import differences_from_sync, train_async_here
from run_equality import differing_metrics, learnt
from tiny_run import PROMPTS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run, train_here

from rl_metrics.trackers.jsonl import read_metrics

REMAX: dict[str, Any] = {
    "algorithm__advantage": "remax",
    "rollout__group_size": 1,
    "rollout__mask_truncated": True,
    "trainer__steps": 4,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def sync(inputs: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of the synchronous trainer, with groups of one, that stored its rollouts in its folder's `cache`."""
    run = copy_tiny_run(inputs, tmp_path_factory.mktemp("sync"))
    assert train_here(run, **REMAX, **cache_of(run)) == 0
    return run


def cache_of(run: TinyRun) -> dict[str, Any]:
    return {"rollout_cache__enabled": True, "rollout_cache__directory": run.folder / "cache"}


def differing(run: TinyRun, expected: TinyRun) -> list[str]:
    return [line for line in differing_metrics(run, expected) if "rollout/replayed" not in line]


def test_the_advantage_is_the_reward_beyond_the_greedy_one(sync: TinyRun) -> None:
    for row in read_metrics(sync.run_folder / "metrics.jsonl"):
        if not row.step:
            continue
        found = row.metrics
        assert found["rollout/num_groups"] == found["rollout/num_trajectories"] == PROMPTS_PER_STEP
        assert found["critic/advantages/max"] <= found["critic/rewards/max"]
        assert 0 <= found["rollout/greedy_reward"] <= 1
        assert found["rollout/failed_sessions"] == 0
    assert found["critic/advantages/max"] > found["critic/advantages/min"]


def test_the_asynchronous_trainer_learns_the_same_on_policy(inputs: TinyRun, sync: TinyRun, tmp_path: Path) -> None:
    run = copy_tiny_run(inputs, tmp_path / "async")
    assert train_async_here(run, **REMAX, schedule__max_staleness=0) == 0
    assert [one for one in differences_from_sync(run, sync) if "rollout/replayed" not in one] == []
    assert learnt(run, step=4) == learnt(sync, step=4)


def test_a_resumed_run_and_a_replayed_one_learn_the_same(sync: TinyRun, tmp_path: Path) -> None:
    run = copy_tiny_run(sync, tmp_path / "again")
    assert train_here(run, **REMAX | {"trainer__steps": 2}) == 0
    assert train_here(run, "--resume", **REMAX) == 0
    assert learnt(run, step=4) == learnt(sync, step=4)
    assert train_here(run, run__if_exists="archive", **REMAX, **cache_of(run)) == 0
    assert differing(run, sync) == []
    assert learnt(run, step=4) == learnt(sync, step=4)


def test_groups_stored_without_a_baseline_are_not_replayed(
    inputs: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_tiny_run(inputs, tmp_path / "run")
    changes = {"trainer__steps": 1, "trainer__validate_first": False, **cache_of(run)}
    assert train_here(run, **REMAX | {"algorithm__advantage": "reinforce_plus_plus"} | changes) == 0
    assert train_here(run, run__if_exists="archive", **REMAX | changes) == 1
    assert 'loop.baseline: stored none, now "greedy"' in capsys.readouterr().err
    accepted = {"rollout_cache__on_mismatch": "accept", "run__if_exists": "archive"}
    assert train_here(run, **REMAX | changes | accepted) == 2
    assert "a stored group has none. Generate it again" in capsys.readouterr().err
