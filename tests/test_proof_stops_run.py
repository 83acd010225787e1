"""A failed weight proof ends the run as failed, and the error names the tensor."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_equality import ASIDE
from tiny_run import TinyRun, make_tiny_run, train_here

from rl_core.weights.digests import probe_tensor
from rl_core.weights.transports import TensorTransport
from rl_core.weights.update import InProcess, WeightReceipt, WeightUpdate
from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics
from rl_rollout.engines.transformers_stepper import TransformersStepper

NAME = "model.layers.0.mlp.up_proj.weight"
DAMAGED_VERSION = 3


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return make_tiny_run(tmp_path)


class CorruptingTransport(TensorTransport):
    """Changes one element of a tensor in version 3, after its digest is computed."""

    def pack(self, tensors: Mapping[str, torch.Tensor], *, version: int, tied: Mapping[str, str]) -> WeightUpdate:
        update = super().pack(tensors, version=version, tied=tied)
        if version != DAMAGED_VERSION:
            return update
        damaged = tensors[NAME].clone()
        damaged[2, 1] += 1e-6
        return replace(update, location=InProcess(tensors={**tensors, NAME: damaged}))


def assert_failed_at_step_3(run: TinyRun, error: str) -> None:
    events = read_events(run.run_folder / "events.jsonl")
    kinds = [event["event"] for event in events if event["event"] not in ASIDE]
    assert sorted(kinds[1:-1]) == ["checkpoint_saved", "weight_proof_failed"]  # in either order
    assert (kinds[0], kinds[-1]) == ("run_started", "run_failed")
    [failed] = [event for event in events if event["event"] == "weight_proof_failed"]
    assert failed["tensor"] == NAME
    assert events[-1]["step"] == 2
    assert error in events[-1]["error"]
    assert [row.step for row in read_metrics(run.run_folder / "metrics.jsonl")] == [0, 1, 2]
    assert not (run.run_folder / "summary.json").exists()


def test_a_corrupted_tensor_stops_the_run(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rl_sync_trainer.training_run.make_transport", lambda settings: CorruptingTransport())
        assert train_here(run) == 1
    said = capsys.readouterr()
    assert f"WeightProofError: tensor '{NAME}' was changed in transit to the engine" in said.err
    assert f"at version {DAMAGED_VERSION}" in said.err
    assert "run finished" not in said.out
    assert_failed_at_step_3(run, NAME)
    assert train_here(run, "--resume") == 0
    assert [row.step for row in read_metrics(run.run_folder / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_proof_that_fails_once_is_tried_again_from_scratch(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    class CorruptingOnce(CorruptingTransport):
        has_corrupted = False

        def pack(self, tensors: Mapping[str, torch.Tensor], *, version: int, tied: Mapping[str, str]) -> WeightUpdate:
            if self.has_corrupted:
                return TensorTransport.pack(self, tensors, version=version, tied=tied)
            self.has_corrupted = version == DAMAGED_VERSION
            return super().pack(tensors, version=version, tied=tied)

    monkeypatch.setattr("rl_sync_trainer.training_run.make_transport", lambda settings: CorruptingOnce())
    assert train_here(run) == 0
    events = read_events(run.run_folder / "events.jsonl")
    (failed,) = [event for event in events if event["event"] == "weight_proof_failed"]
    assert (failed["version"], failed["tensor"]) == (DAMAGED_VERSION, NAME)
    assert events[-1]["event"] == "run_finished"


def test_a_stale_tensor_stops_the_run(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update_weights = TransformersStepper.update_weights

    def update_all_but_one(stepper: TransformersStepper, update: WeightUpdate) -> WeightReceipt:
        parameter = stepper._model.get_parameter(NAME)
        old = parameter.clone()
        receipt = update_weights(stepper, update)
        if update.version != DAMAGED_VERSION:
            return receipt
        with torch.inference_mode():
            parameter.copy_(old)
        return replace(receipt, live={**receipt.live, NAME: probe_tensor(parameter)})

    monkeypatch.setattr(TransformersStepper, "update_weights", update_all_but_one)
    assert train_here(run) == 1
    assert f"WeightProofError: tensor '{NAME}' arrived, but the engine serves something else" in capsys.readouterr().err
    assert_failed_at_step_3(run, NAME)
