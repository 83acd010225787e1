"""A run that replays its rollouts from a skip cache learns the same as the run that generated them."""

import signal
from pathlib import Path
from typing import Any

import pytest
from run_equality import differing_metrics, learnt, metrics_without_clock, summary
from tiny_run import (
    NUM_PROBLEMS,
    REWARDS_BEFORE_STEP_1,
    REWARDS_PER_STEP,
    TinyRun,
    copy_tiny_run,
    make_tiny_run,
    train_here,
)
from train_process import training, wait_until_held

from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics

STEPS = 10
IN_STEP_6 = REWARDS_BEFORE_STEP_1 + 5 * REWARDS_PER_STEP + 2 * NUM_PROBLEMS["validation"] + REWARDS_PER_STEP // 2


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of ten steps that stored its rollouts in its folder's `cache`."""
    run = make_tiny_run(tmp_path_factory.mktemp("cached"))
    assert train_here(run, trainer__steps=STEPS, **cache_of(run)) == 0
    return run


@pytest.fixture
def run(cached: TinyRun, tmp_path: Path) -> TinyRun:
    """A copy of the inputs and the stored rollouts, without a run."""
    return copy_tiny_run(cached, tmp_path / "run")


def cache_of(run: TinyRun, **options: Any) -> dict[str, Any]:
    return {"rollout_cache__enabled": True, "rollout_cache__directory": run.folder / "cache"} | {
        f"rollout_cache__{name}": value for name, value in options.items()
    }


def replayed(run: TinyRun) -> list[float | None]:
    """Return `rollout/replayed` of each step from 1."""
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    return [row.metrics.get("rollout/replayed") for row in rows if row.step]


def events(run: TinyRun, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.run_folder / "events.jsonl") if event["event"] == name]


def differing(run: TinyRun, expected: TinyRun) -> list[str]:
    """Return the metrics that differ, except for the mark of a replay."""
    return [line for line in differing_metrics(run, expected) if "rollout/replayed" not in line]


def _without_mark(rows: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    return [(step, {name: m[name] for name in m if name != "rollout/replayed"}) for step, m in rows]


def test_a_replayed_run_has_the_losses_and_metrics_of_the_one_that_generated(
    run: TinyRun, cached: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(run, trainer__steps=STEPS, **cache_of(run)) == 0
    assert capsys.readouterr().out.count("replayed 100%") == STEPS
    assert replayed(cached) == [0.0] * STEPS
    assert replayed(run) == [1.0] * STEPS
    assert differing(run, cached) == []
    assert learnt(run, step=STEPS) == learnt(cached, step=STEPS)
    assert summary(run) == summary(cached)
    assert len(events(cached, "skip_stored")) == len(events(run, "skip_hit")) == STEPS
    for row in read_metrics(run.run_folder / "metrics.jsonl"):
        if row.step:
            assert 0 < row.metrics["timing_s/load_rollouts"] <= row.metrics["timing_s/gen"]
            assert row.metrics["timing_s/replayed_gen"] > 0
            assert "timing_s/reward" not in row.metrics


def test_storing_changes_nothing_of_a_run(run: TinyRun, cached: TinyRun) -> None:
    assert train_here(run, trainer__steps=STEPS) == 0
    assert replayed(run) == [None] * STEPS
    assert differing(run, cached) == []
    assert learnt(run, step=STEPS) == learnt(cached, step=STEPS)


def test_a_run_that_replays_a_part_goes_on_with_the_prompts_that_come_next(run: TinyRun, cached: TinyRun) -> None:
    """The prompt source also advances with every replay, so later steps generate the same rollouts."""
    assert train_here(run, trainer__steps=STEPS, **cache_of(run, steps="1-4,7")) == 0
    assert replayed(run) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert differing(run, cached) == []
    assert learnt(run, step=STEPS) == learnt(cached, step=STEPS)


def test_a_run_killed_in_the_middle_stores_and_replays_on(run: TinyRun, cached: TinyRun) -> None:
    """The run is killed in step 6, after the checkpoint of step 4: it replays step 5 and generates the rest."""
    options = {"rollout_cache__directory": run.folder / "fresh", "rollout_cache__enabled": True}
    with training(run, hold_after=IN_STEP_6, reward__timeout_s=None, trainer__steps=STEPS, **options) as process:
        wait_until_held(process, run)
        process.wait_until(lambda: len(events(run, "checkpoint_saved")) == 2, "checkpoint of step 4")
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert train_here(run, "--resume", trainer__steps=STEPS, **options) == 0
    assert replayed(run) == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert differing(run, cached) == []
    assert learnt(run, step=STEPS) == learnt(cached, step=STEPS)


def test_another_learning_rate_is_told_from_the_second_step_on_and_can_be_accepted(
    run: TinyRun, cached: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"trainer__steps": 3, "optimizer__learning_rate": 1e-4}
    assert train_here(run, **settings, **cache_of(run)) == 1
    error = capsys.readouterr().err
    assert (
        "train-00000002-0000.zarr.zip was generated with different inputs or settings:\n  policy.weights: stored "
        in error
    )
    assert 'rollout_cache.on_mismatch = "accept"' in error
    (mismatch,) = events(run, "skip_mismatch")
    assert mismatch["wanted"] == "train-00000002-0000"
    assert train_here(run, **settings, run__if_exists="archive", **cache_of(run, on_mismatch="accept")) == 0
    assert replayed(run) == [1.0] * 3
    assert len(events(run, "skip_mismatch")) == 2
    rewards, stored = (
        [m["critic/rewards/mean"] for step, m in metrics_without_clock(r) if step] for r in (run, cached)
    )
    assert rewards == stored[:3]


def test_a_reward_that_is_changed_scores_what_is_stored(run: TinyRun, cached: TinyRun) -> None:
    """The result equals a run that starts with the new reward, because step 1 generates the same rollouts."""
    reward = run.folder / "reward.py"
    reward.write_text(reward.read_text().replace('"02468"', '"13579"'))
    options = {
        "rollout_cache__directory": run.folder / "cache",
        "rollout_cache__enabled": True,
        "rollout_cache__steps": 1,
    }
    assert train_here(run, trainer__steps=2, **options) == 1
    assert "reward.function.content" in str(events(run, "skip_mismatch"))
    assert train_here(run, trainer__steps=2, run__if_exists="archive", rollout_cache__rewards="again", **options) == 0
    assert replayed(run) == [1.0, 0.0]
    assert events(run, "skip_mismatch") == []
    found = metrics_without_clock(run)
    assert train_here(run, trainer__steps=2, run__if_exists="archive") == 0
    assert _without_mark(found) == metrics_without_clock(run)
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert (
        rows[1].metrics["critic/rewards/mean"]
        != read_metrics(cached.run_folder / "metrics.jsonl")[1].metrics["critic/rewards/mean"]
    )


def test_one_step_is_trained_on_again_and_again(run: TinyRun, cached: TinyRun) -> None:
    """repeat_last on one stored step keeps the rewards, changes the loss, and increases the staleness by 1 per step."""
    options = {
        "rollout_cache__directory": run.folder / "fresh",
        "rollout_cache__enabled": True,
        "rollout_cache__action": "repeat_last",
    }
    assert train_here(run, trainer__steps=4, **options) == 0
    assert replayed(run) == [0.0, 1.0, 1.0, 1.0]
    rows = [metrics for step, metrics in metrics_without_clock(run) if step]
    assert len({row["critic/rewards/mean"] for row in rows}) == 1
    assert [row["training/staleness/max"] for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert len({row["actor/loss"] for row in rows}) == 4


def test_several_updates_a_step_share_its_entry(run: TinyRun) -> None:
    settings = {"trainer__steps": 2, "trainer__minibatches": 2, "trainer__epochs": 2}
    options = {"rollout_cache__directory": run.folder / "fresh", "rollout_cache__enabled": True}
    assert train_here(run, **settings, **options) == 0
    first = metrics_without_clock(run)
    assert len(events(run, "skip_stored")) == 2
    assert train_here(run, **settings, **options, run__if_exists="archive") == 0
    assert replayed(run) == [1.0, 1.0]
    assert _without_mark(metrics_without_clock(run)) == _without_mark(first)


def test_refilled_steps_have_an_entry_for_each_round(run: TinyRun) -> None:
    settings = {"trainer__steps": 2, "dynamic_sampling__filter": "reward_spread", "dynamic_sampling__max_rounds": 2}
    options = {"rollout_cache__directory": run.folder / "fresh", "rollout_cache__enabled": True}
    assert train_here(run, **settings, **options) == 0
    first = metrics_without_clock(run)
    rounds = sum(int(metrics["rollout/num_rounds"]) for step, metrics in first if step)
    assert len(events(run, "skip_stored")) == rounds
    assert train_here(run, **settings, **options, run__if_exists="archive") == 0
    assert replayed(run) == [1.0, 1.0]
    assert _without_mark(metrics_without_clock(run)) == _without_mark(first)


def test_validation_is_replayed_where_that_is_asked_for(run: TinyRun) -> None:
    options = {
        "rollout_cache__directory": run.folder / "fresh",
        "rollout_cache__enabled": True,
        "rollout_cache__validation": True,
    }
    assert train_here(run, trainer__steps=2, **options) == 0
    names = sorted(path.name for path in (run.folder / "fresh").iterdir())
    assert names == [
        f"{kind}-{step:08d}-0000.zarr.zip"
        for kind, steps in (("test", (0, 2)), ("train", (1, 2)), ("validation", (0, 2)))
        for step in steps
    ]
    first = summary(run)
    assert train_here(run, trainer__steps=2, run__if_exists="archive", **options) == 0
    assert summary(run) == first
    assert len(events(run, "skip_hit")) == 6


def test_several_responses_to_a_problem_are_replayed_as_they_were_drawn(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "rollout_cache__directory": run.folder / "fresh",
        "rollout_cache__enabled": True,
        "rollout_cache__validation": True,
    }
    several = {"prompts__validation_samples": 3, "prompts__validation_temperature": 1.0, "trainer__steps": 1}
    assert train_here(run, **several, **options) == 0
    first = metrics_without_clock(run)
    assert any(name.endswith("/best@3/mean") for name in first[0][1])
    assert train_here(run, run__if_exists="archive", **several, **options) == 0
    assert len(events(run, "skip_hit")) == 5
    assert _without_mark(metrics_without_clock(run)) == _without_mark(first)
    for other, says in (
        ({"prompts__validation_samples": 2}, "group_size: stored 3, now 2"),
        ({"prompts__validation_temperature": 0.5}, "sampling.temperature: stored 1.0, now 0.5"),
    ):
        assert train_here(run, run__if_exists="archive", **(several | other), **options) == 1
        assert (
            f"validation-00000000-0000.zarr.zip was generated with different inputs or settings:\n  {says}"
            in capsys.readouterr().err
        )


def test_mistakes_in_the_settings_are_refused_before_anything_starts(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(run, **cache_of(run, steps="5-2", max_bytes=0)) == 2
    error = capsys.readouterr().err
    assert "rollout_cache.max_bytes must be at least 1, or none; found '0'." in error
    assert "rollout_cache.steps must be numbers from 1 or ascending ranges; found '5-2'" in error
    assert train_here(run, **cache_of(run, action="again")) == 2
    assert "rollout_cache.action" in capsys.readouterr().err
    (run.folder / "file").write_text("")
    assert train_here(run, rollout_cache__enabled=True, rollout_cache__directory=run.folder / "file") == 2
    assert "must be an existing or new folder; it is a file." in capsys.readouterr().err
    assert train_here(run, **cache_of(run, directory="nosuch://place")) == 2
    assert "rollout_cache.directory: nosuch://place" in capsys.readouterr().err
    assert train_here(run, **cache_of(run, steps="20-")) == 2
    assert "rollout_cache.steps = '20-' selects no step up to trainer.steps = 4." in capsys.readouterr().err
    assert not run.run_folder.exists()
    assert train_here(run, "--dry-run", **cache_of(run, steps="1-3")) == 0
    assert f"steps 1-3 from the rollout cache {run.folder / 'cache'} (action cache)" in capsys.readouterr().out
