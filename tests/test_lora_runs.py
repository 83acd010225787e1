"""Both trainers train an adapter: served or merged, killed, and resumed."""

import signal
from pathlib import Path
from typing import Any

import pytest
from async_runs import differences_from_sync, train_async_here
from run_equality import assert_equal_runs, learnt, metrics_without_clock
from tiny_run import REWARDS_BEFORE_STEP_1, REWARDS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run, train_here
from train_process import training

from rl_metrics.trackers.jsonl import read_metrics

LORA: dict[str, Any] = {
    "lora__rank": 4,
    "optimizer__learning_rate": 3e-2,
    "algorithm__kl_coefficient": 0.01,
    "trainer__checkpoint_every": 1,
}
IN_STEP_3 = REWARDS_BEFORE_STEP_1 + 2 * REWARDS_PER_STEP + REWARDS_PER_STEP // 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A synchronous run whose engine serves the adapter."""
    run = make_tiny_run(tmp_path_factory.mktemp("undisturbed"))
    assert train_here(run, **LORA) == 0
    return run


@pytest.fixture
def run(undisturbed: TinyRun, tmp_path: Path) -> TinyRun:
    """A copy of the inputs, without a run."""
    return copy_tiny_run(undisturbed, tmp_path / "run")


def rows_of(run: TinyRun) -> list[dict[str, float]]:
    """Return the metrics of each step from 1."""
    return [dict(row.metrics) for row in read_metrics(run.run_folder / "metrics.jsonl") if row.step]


def test_the_adapter_trains_arrives_and_is_little(undisturbed: TinyRun) -> None:
    rows = rows_of(undisturbed)
    assert all(row["weights/canary_max_diff"] < 1e-4 and row["actor/grad_norm"] > 0 for row in rows)
    assert rows[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6), "the reference is the base, and so is the policy"
    assert rows[-1]["actor/kl_loss"] > 1e-3, "the reference does not move with the adapter"
    trained = 4 * 2 * ((32 + 128) + 2 * (32 + 64) + (128 + 32) + 3 * (32 + 64))
    assert [row["weights/size_gb"] * 2**30 for row in rows] == [4 * trained] * len(rows)


def test_merged_weights_train_as_the_adapter_does(run: TinyRun, undisturbed: TinyRun) -> None:
    assert train_here(run, **LORA, lora__serving="merged") == 0
    found, wanted = dict(metrics_without_clock(run)), dict(metrics_without_clock(undisturbed))
    assert rows_of(run)[0]["weights/size_gb"] > 4 * rows_of(undisturbed)[0]["weights/size_gb"]
    for name in ("actor/grad_norm", "actor/kl_loss", "critic/rewards/mean"):
        assert [found[step][name] for step in (1, 2, 3, 4)] == pytest.approx(
            [wanted[step][name] for step in (1, 2, 3, 4)], rel=1e-3, abs=1e-5
        )


def test_on_policy_the_asynchronous_trainer_does_the_same_bit_for_bit(run: TinyRun, undisturbed: TinyRun) -> None:
    assert train_async_here(run, **LORA, schedule__max_staleness=0) == 0
    assert differences_from_sync(run, undisturbed) == []
    assert learnt(run) == learnt(undisturbed)


def test_killed_and_resumed(run: TinyRun, undisturbed: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("TINY_RUN_SIGNAL", str(int(signal.SIGKILL)))
        with training(run, hold_after=IN_STEP_3, **LORA) as process:
            assert process.wait() == -signal.SIGKILL
            assert process.leftovers() == []
    assert train_here(run, "--resume", **LORA) == 0
    assert_equal_runs(run, undisturbed)


def test_another_adapter_does_not_resume_the_run(undisturbed: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert train_here(undisturbed, "--resume", **{**LORA, "lora__rank": 8}) == 2
    assert "lora.rank" in capsys.readouterr().err
