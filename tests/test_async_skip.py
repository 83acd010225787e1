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
    """A run that has stored four steps in its folder's `cache`."""
    run = make_tiny_run(tmp_path_factory.mktemp("inputs"))
    assert train_async_here(run, **settings(run)) == 0
    return run


@pytest.fixture
def run(inputs: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_tiny_run(inputs, tmp_path / "run")


def settings(run: TinyRun, **more: Any) -> dict[str, Any]:
    return {
        "trainer__steps": STEPS,
        "schedule__max_staleness": 1,
        "policy__learner": "torch",
        "prompts__validation_limit": 2,
        "skip__enabled": True,
        "skip__directory": run.folder / "cache",
        **more,
    }


def entries(folder: Path) -> dict[int, list[str]]:
    """Return the uids of each stored step."""
    store = EntryStore(str(folder))
    return {key.step: [group.prompt.uid for group in store.read(key).groups] for key in store.entries()}


def events(run: TinyRun, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.run_folder / "events.jsonl") if event["event"] == name]


def rewards(run: TinyRun) -> list[float]:
    file = run.run_folder / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    return [row.metrics["critic/rewards/mean"] for row in rows if row.step]


def test_each_step_has_one_entry_with_the_groups_that_fill_it(inputs: TinyRun) -> None:
    found = entries(inputs.folder / "cache")
    issued = list(run_history(inputs.run_folder).issued)
    assert list(found) == [1, 2, 3, 4]
    assert [uid for step in found.values() for uid in step] == issued[: STEPS * PROMPTS_PER_STEP]


def test_the_same_run_again_replays_all_its_steps(run: TinyRun) -> None:
    assert train_async_here(run, **settings(run)) == 0
    assert [event["wanted"] for event in events(run, "skip_hit")] == [EntryKey(step=step).name for step in (1, 2, 3, 4)]
    history = run_history(run.run_folder)
    assert list(history.steps.values()) == [tuple(uids) for uids in entries(run.folder / "cache").values()]


def test_other_prompts_replay_the_stored_ones_if_that_is_accepted(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_async_here(run, **settings(run, run__seed=5)) == 1
    assert "seed: stored 0, now 5" in capsys.readouterr().err
    accepted = settings(run, run__seed=5, run__if_exists="archive", skip__on_mismatch="accept")
    assert train_async_here(run, **accepted) == 0
    assert len(events(run, "skip_hit")) == STEPS


@pytest.mark.parametrize(("action", "expected"), [("repeat", [1, 2, 1, 2]), ("repeat_last", [1, 1, 1, 1, 1])])
def test_steps_are_repeated(run: TinyRun, action: str, expected: list[int]) -> None:
    more = {"skip__directory": run.folder / "fresh", "skip__action": action, "trainer__steps": 6}
    if action == "repeat":
        more["skip__steps"] = "1-2"
    assert train_async_here(run, **settings(run, **more)) == 0
    assert [event["entry"] for event in events(run, "skip_hit")] == [EntryKey(step=step).name for step in expected]
    assert list(entries(run.folder / "fresh")) == sorted(set(expected))
    assert rewards(run)[-len(expected) :] == pytest.approx(stored_rewards(run.folder / "fresh", expected))


def test_a_killed_run_repeats_its_range_and_goes_on_in_order(tmp_path: Path) -> None:
    """All processes of a run are killed in step 2 of the range, and again while it repeats."""
    run = make_tiny_run(tmp_path)
    fresh = run.folder / "fresh"
    more = settings(run, skip__action="repeat", skip__steps="1-3", skip__directory=fresh, trainer__steps=9)
    more |= {"engine__max_num_seqs": 4, "trainer__validate_every": 0, "trainer__validate_first": False}
    with async_training(run, hold_after=IN_STEP_2, reward__timeout_s=None, **more) as process:
        wait_until_held(process, run)
        process.wait_until(lambda: rewards(run) != [], "step 1")
        process.kill_all()
    with async_training(run, "--resume", **more) as process:
        process.wait_until(lambda: len(rewards(run)) >= 6, "step 6")
        process.kill_all()
    assert train_async_here(run, "--resume", **more) == 0
    told = {event["wanted"]: event["entry"] for event in events(run, "skip_hit")}
    expected = {4: 1, 6: 3, 7: 1, 8: 2, 9: 3}
    assert told == {EntryKey(step=step).name: EntryKey(step=own).name for step, own in expected.items()}
    assert list(entries(fresh)) == [1, 2, 3], "step 5 made the entry that the kill of step 2 lost"
    assert rewards(run)[2:] == pytest.approx(stored_rewards(fresh, [3, 1, 2, 3, 1, 2, 3]))
    trained = [uid for uids in run_history(run.run_folder).steps.values() for uid in uids]
    assert len(trained) == len(set(trained)) == 9 * PROMPTS_PER_STEP


def stored_rewards(folder: Path, steps: list[int]) -> list[float]:
    """Return the mean reward of stored steps."""
    store = EntryStore(str(folder))
    groups = [store.read(EntryKey(step=step)).groups for step in steps]
    return [float(np.mean([row.reward for group in each for row in group.trajectories])) for each in groups]
