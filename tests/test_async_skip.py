"""Skip caches in asynchronous runs: entries are steps, and every action replays them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_runs import async_training, run_history, train_async_here
from tiny_run import PROMPTS_PER_STEP, REWARDS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run
from train_process import wait_until_held

from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics
from rl_rollout.skip import EntryKey, EntryStore

STEPS = 4
IN_STEP_2 = REWARDS_PER_STEP + 10


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of four steps that has stored steps 1 and 2 in its folder's `cache`, and repeated them."""
    run = make_tiny_run(tmp_path_factory.mktemp("inputs"))
    assert train_async_here(run, **settings(run, rollout_cache__action="repeat", rollout_cache__steps="1-2")) == 0
    return run


@pytest.fixture
def run(inputs: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_tiny_run(inputs, tmp_path / "run")


def settings(run: TinyRun, **more: Any) -> dict[str, Any]:
    return {
        "trainer__steps": STEPS,
        "schedule__max_staleness": 1,
        "prompts__validation_limit": 2,
        "rollout_cache__enabled": True,
        "rollout_cache__directory": run.folder / "cache",
        **more,
    }


def entries(folder: Path) -> dict[int, list[str]]:
    """Return the uids of each stored step."""
    store = EntryStore(str(folder))
    return {key.step: [group.prompt.uid for group in store.read(key).groups] for key in store.entries()}


def events(run: TinyRun, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.run_folder / "events.jsonl") if event["event"] == name]


def hits(run: TinyRun) -> dict[int, int]:
    """Return the step whose entry each replayed step used."""
    found = {EntryKey.parse(event["wanted"]): EntryKey.parse(event["entry"]) for event in events(run, "skip_hit")}
    return {key.step: source.step for key, source in found.items() if key and source}


def replayed(run: TinyRun) -> list[float]:
    """Return `rollout/replayed` of each step from 1."""
    return [row.metrics["rollout/replayed"] for row in read_metrics(run.run_folder / "metrics.jsonl") if row.step]


def rewards(run: TinyRun) -> list[float]:
    file = run.run_folder / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    return [row.metrics["critic/rewards/mean"] for row in rows if row.step]


def test_repeat_stores_its_range_and_repeats_it_in_the_same_run(inputs: TinyRun) -> None:
    assert hits(inputs) == {3: 1, 4: 2}
    assert replayed(inputs) == [0, 0, 1, 1]
    found = entries(inputs.folder / "cache")
    assert list(found) == [1, 2]
    issued = list(run_history(inputs.run_folder).issued)
    assert [uid for step in found.values() for uid in step] == issued[: 2 * PROMPTS_PER_STEP]
    assert rewards(inputs)[2:] == pytest.approx(stored_rewards(inputs.folder / "cache", [1, 2]))


def test_cache_replays_its_entries_and_stores_the_rest(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_async_here(run, **settings(run)) == 0
    assert hits(run) == {1: 1, 2: 2}
    assert list(entries(run.folder / "cache")) == [1, 2, 3, 4]
    assert replayed(run) == [1, 1, 0, 0]
    assert capsys.readouterr().out.count("replayed 100%") == 2


def test_other_prompts_replay_the_stored_ones_if_that_is_accepted(run: TinyRun) -> None:
    accepted = settings(
        run, run__seed=5, rollout_cache__on_mismatch="accept", rollout_cache__steps="1-2", trainer__steps=2
    )
    assert train_async_here(run, **accepted) == 0
    assert hits(run) == {1: 1, 2: 2}
    assert "seed: stored 0, now 5" in str(events(run, "skip_mismatch"))


def test_repeat_last_trains_on_one_step_with_roles_in_processes(run: TinyRun) -> None:
    fresh = run.folder / "fresh"
    more = {"roles__placement": "process", "rollout_cache__action": "repeat_last", "rollout_cache__directory": fresh}
    assert train_async_here(run, **settings(run, **more)) == 0
    assert hits(run) == {2: 1, 3: 1, 4: 1}
    assert rewards(run) == pytest.approx(stored_rewards(fresh, [1] * STEPS))


def test_a_killed_run_repeats_its_range_and_goes_on_in_order(tmp_path: Path) -> None:
    """All processes of a run are killed in step 2 of the range, and again while it repeats."""
    run = make_tiny_run(tmp_path)
    fresh = run.folder / "fresh"
    more = settings(
        run,
        rollout_cache__action="repeat",
        rollout_cache__steps="1-3",
        rollout_cache__directory=fresh,
        trainer__steps=9,
    )
    more |= {"vllm__max_num_seqs": 4, "trainer__validate_every": 0, "trainer__validate_first": False}
    with async_training(run, hold_after=IN_STEP_2, reward__timeout_s=None, **more) as process:
        wait_until_held(process, run)
        process.wait_until(lambda: rewards(run) != [], "step 1")
        process.kill_all()
    with async_training(run, "--resume", **more) as process:
        process.wait_until(lambda: len(rewards(run)) >= 6, "step 6")
        process.kill_all()
    assert train_async_here(run, "--resume", **more) == 0
    assert hits(run).items() <= {4: 1, 6: 3, 7: 1, 8: 2, 9: 3}.items(), "a kill loses the events of its last seconds"
    assert list(entries(fresh)) == [1, 2, 3], "step 5 made the entry that the kill of step 2 lost"
    assert replayed(run) == [0, 0, 0, 1, 0, 1, 1, 1, 1]
    assert rewards(run)[2:] == pytest.approx(stored_rewards(fresh, [3, 1, 2, 3, 1, 2, 3]))
    trained = [uid for uids in run_history(run.run_folder).steps.values() for uid in uids]
    assert len(trained) == len(set(trained)) == 9 * PROMPTS_PER_STEP


def stored_rewards(folder: Path, steps: list[int]) -> list[float]:
    """Return the mean reward of stored steps."""
    store = EntryStore(str(folder))
    groups = [store.read(EntryKey(step=step)).groups for step in steps]
    return [float(np.mean([row.reward for group in each for row in group.trajectories])) for each in groups]
