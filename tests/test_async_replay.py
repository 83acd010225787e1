"""A recorded asynchronous run, replayed from the skip cache: the same training sequence, the same losses."""

from pathlib import Path

import pytest
from async_runs import run_history, train_async_here
from run_equality import learnt
from tiny_run import TinyRun, copy_tiny_run, make_tiny_run

from rl_metrics.trackers.jsonl import read_metrics

STEPS = 6


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Return a run with stale groups and partial responses, whose groups are in the skip cache."""
    run = make_tiny_run(tmp_path_factory.mktemp("recorded"))
    assert train_async_here(run, **settings(run)) == 0
    return run


def settings(run: TinyRun, **more: object) -> dict[str, object]:
    return {
        "trainer__steps": STEPS,
        "schedule__max_staleness": 2,
        "vllm__max_num_seqs": 8,
        "rollout__max_response_tokens": 24,
        "prompts__validation_limit": 2,
        "rollout_cache__enabled": True,
        "rollout_cache__directory": run.folder / "cache",
        **more,
    }


def losses(run: TinyRun) -> list[dict[str, float]]:
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    learnt_names = ("actor/", "critic/", "rollout_corr/", "training/", "response_length/", "fully_async/staleness/")
    return [{name: row.metrics[name] for name in row.metrics if name.startswith(learnt_names)} for row in rows]


def test_a_replay_trains_the_same_groups_with_the_same_losses(recorded: TinyRun, tmp_path: Path):
    replay = copy_tiny_run(recorded, tmp_path / "replay")
    chosen = settings(recorded, rollout_cache__on_mismatch="error")
    assert train_async_here(replay, "--replay", str(recorded.run_folder), **chosen) == 0
    assert run_history(replay.run_folder).steps == run_history(recorded.run_folder).steps
    assert losses(replay) == losses(recorded)
    assert learnt(replay, step=STEPS) == learnt(recorded, step=STEPS)
    rows = [row.metrics for row in read_metrics(replay.run_folder / "metrics.jsonl") if row.step]
    assert {row["rollout/replayed"] for row in rows if "rollout/replayed" in row} == {1.0}


def test_a_replay_needs_a_record_of_so_many_steps(
    recorded: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    replay = copy_tiny_run(recorded, tmp_path / "replay")
    chosen = settings(recorded, trainer__steps=STEPS + 1)
    assert train_async_here(replay, "--replay", str(recorded.run_folder), **chosen) == 2
    assert f"has {STEPS} steps, and trainer.steps = {STEPS + 1}" in capsys.readouterr().err
    assert train_async_here(replay, "--replay", str(tmp_path), **chosen) == 2
    assert "has 0 steps" in capsys.readouterr().err


def test_a_replay_of_other_prompts_is_refused(recorded: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    replay = copy_tiny_run(recorded, tmp_path / "replay")
    chosen = settings(recorded, run__seed=1)
    assert train_async_here(replay, "--replay", str(recorded.run_folder), **chosen) == 2
    assert "Replay with the prompt files" in capsys.readouterr().err
    assert [path.name for path in replay.run_folder.iterdir()] == [".lock"], "the next run would take up its queue"
