"""The best checkpoint of a run's files, and what its validations decide."""

import json
from pathlib import Path

import pytest
import tomli_w

from rl_core.errors import SettingsError
from rl_distill.background import PendingSave
from rl_distill.checkpoints.store import CheckpointStore
from rl_metrics.targets import EXACT, TargetOptions
from rl_sync_trainer.main import main
from rl_trainer_parts.run.folder import FORMAT
from rl_trainer_parts.run.goal import Goal, best_checkpoint
from rl_trainer_parts.settings.schema import TrainerSettings

ACCURACY, LENGTH = "val-core/math/acc/mean@1", "val-aux/math/length/mean@1"


def write_metrics(run: Path, rows: dict[int, dict[str, float]]) -> None:
    lines = [json.dumps({"step": step, "time": 1.0, **metrics}) for step, metrics in rows.items()]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with validations at every other step, and checkpoints of steps 2, 4, 6 and 7."""
    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints", keep=9)
    for step in (2, 4, 6, 7):

        def write_learner(folder: Path, step: int = step) -> PendingSave:
            (folder / "policy").mkdir()
            (folder / "policy" / "config.json").write_text("{}")
            (folder / "policy" / "model.safetensors").write_text(f"weights of step {step}")
            return PendingSave()

        store.begin(step, {"step": step}, write_learner)
    store.close()
    values = {0: 0.9, 2: 0.5, 4: 0.7, 6: 0.7, 8: 0.6}
    write_metrics(run, {step: {ACCURACY: value, LENGTH: 10.0 * step} for step, value in values.items()})
    return run


def choose(run: Path, **target: object) -> None:
    (run / "settings.toml").write_text(tomli_w.dumps({"trainer": {"target": target}}))
    (run / "format").write_text(f"{FORMAT}\n")


def found(run: Path) -> tuple[str, list[str]]:
    said: list[str] = []
    return best_checkpoint(run, said.append).name, said


def test_the_best_is_the_first_of_the_best_validations_of_a_trained_policy(run: Path) -> None:
    assert found(run) == (
        "step_4",
        [
            f"best checkpoint: {run / 'checkpoints' / 'step_4'}, by the validation of step 4 "
            "(validation (mean of val-core/*/mean@N) = 0.7)"
        ],
    )


def test_the_targets_metric_decides(run: Path) -> None:
    choose(run, metric=LENGTH, lower_is_better=True)
    assert found(run)[0] == "step_2"


def test_a_torn_checkpoint_is_passed_over_with_a_note(run: Path) -> None:
    (run / "checkpoints" / "step_4" / "policy" / "model.safetensors").write_text("torn")
    name, said = found(run)
    assert name == "step_6"
    assert "step 4 (validation (mean of val-core/*/mean@N) = 0.7) is better, but its checkpoint is broken" in said[0]


def test_a_checkpoint_that_was_not_kept_is_passed_over_with_a_note(run: Path) -> None:
    choose(run, metric=LENGTH)
    name, said = found(run)
    assert name == "step_6"
    assert "step 8" in said[0]
    assert "not kept" in said[0]


def test_validations_by_other_weights_do_not_count(run: Path) -> None:
    write_metrics(run, {2: {ACCURACY: 0.5, EXACT: 1.0}, 4: {ACCURACY: 0.7, EXACT: 0.0}})
    assert found(run)[0] == "step_2"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({1: {"actor/loss": 0.1}}, "none of the checkpoints of .* has a validation"),
        ({0: {ACCURACY: 0.5}}, "none of the checkpoints of .* has a validation"),
    ],
)
def test_without_a_validated_checkpoint_there_is_no_best(run: Path, rows, message: str) -> None:
    write_metrics(run, rows)
    with pytest.raises(SettingsError, match=message):
        found(run)


def test_a_checkpoint_has_no_best(run: Path) -> None:
    with pytest.raises(SettingsError, match="needs the folder of a run"):
        best_checkpoint(run / "checkpoints" / "step_4", print)


def test_export_writes_the_best(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(tmp_path / "best"), "--best"]) == 0
    assert (tmp_path / "best" / "model.safetensors").read_text() == "weights of step 4"
    assert "best checkpoint:" in capsys.readouterr().out


def goal(**settings: object) -> Goal:
    return Goal(TrainerSettings(**settings))  # type: ignore[arg-type]


def test_a_goal_restores_the_validations_up_to_a_step(run: Path) -> None:
    restored = goal(stop_when_no_better=2)
    restored.restore(run, 4)
    assert restored.stop_reason == (
        "trainer.stop_when_no_better: validation (mean of val-core/*/mean@N) has been no better than its 0.9 of step 0 "
        "for 2 validations"
    )
    assert (restored.best.step, restored.kept) == (4, {4})
    before = goal(stop_when_no_better=2)
    before.restore(run, 3)
    assert before.stop_reason is None


def test_a_changed_target_counts_for_earlier_validations(run: Path) -> None:
    restored = goal(target=TargetOptions(value=0.5, stop=True))
    restored.restore(run, 4)
    assert "reached 0.5 at step 2" in restored.stop_reason
    assert goal(target=TargetOptions(value=0.5)).stop_reason is None


def test_a_checkpoint_under_validation_is_kept_until_its_result() -> None:
    one = goal()
    one.noted(2, {ACCURACY: 0.5})
    one.begun(4)
    assert one.kept == {2, 4}
    assert one.needs_checkpoint(4)
    one.noted(4, {ACCURACY: 0.4})
    assert one.kept == {2}
    one.begun(6)
    one.noted(6, {ACCURACY: 0.6, EXACT: 0.0})
    assert one.kept == {2}, "its checkpoint has other weights"
    one.begun(8)
    one.went_back()
    assert one.kept == {2}


def test_nothing_is_kept_if_the_best_is_not_wanted() -> None:
    one = goal(keep_best=False)
    one.noted(2, {ACCURACY: 0.5})
    one.begun(4)
    assert (one.kept, one.needs_checkpoint(2)) == (frozenset(), False)


def test_a_metric_that_no_validation_reports_ends_the_run_at_the_first_validation() -> None:
    one = goal(target=TargetOptions(metric="val-core/math/acc/mean@4"))
    with pytest.raises(SettingsError, match=ACCURACY):
        one.noted(0, {ACCURACY: 0.5})


def test_the_untrained_policy_neither_reaches_the_target_nor_stops_the_run() -> None:
    one = goal(target=TargetOptions(value=0.4, stop=True))
    one.noted(0, {ACCURACY: 0.5})
    assert one.stop_reason is None
    assert one.best is None
