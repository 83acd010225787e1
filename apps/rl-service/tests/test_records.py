"""The record of a training client survives a full disk."""

from rl_distill.learner import OptimStepResult
from rl_metrics.run_files import open_run
from rl_metrics.trackers import JsonlTracker
from rl_service.records import ClientRecord


def test_a_full_disk_costs_only_the_lines_of_its_time(tmp_path, monkeypatch):
    record = ClientRecord(tmp_path, {}, step=0)

    def fails(*_):
        raise OSError("No space left on device")

    for step in (1, 2, 3):
        with monkeypatch.context() as patch:
            if step == 2:
                patch.setattr(JsonlTracker, "log", fails)
            record.stepped(OptimStepResult(step=step, grad_norm=1.0, learning_rate=0.1, is_applied=True))
    record.close("run_finished", None)
    assert open_run(tmp_path).history.steps.tolist() == [0, 1, 3]
