"""A run whose engine drops its weights in each step and receives them again, with proof."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from tiny_run import make_tiny_run, train_here

from rl_metrics.trackers.jsonl import read_metrics
from rl_rollout.engines.transformers_stepper import TransformersStepper


def test_an_engine_that_drops_its_weights_gets_them_with_each_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    sleep, traits = TransformersStepper.sleep, TransformersStepper.traits.fget

    def noted(stepper: TransformersStepper, level: Literal[1, 2]) -> None:
        levels.append(level)
        sleep(stepper, level)

    monkeypatch.setattr(TransformersStepper, "sleep", noted)
    sleepy: Any = property(lambda stepper: replace(traits(stepper), can_sleep=True))
    monkeypatch.setattr(TransformersStepper, "traits", sleepy)
    run = make_tiny_run(tmp_path)
    assert train_here(run, trainer__steps=2, rollout__offload_engine=True, rollout__offload_keeps_weights=False) == 0
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.step for row in rows] == [0, 1, 2]
    assert rows[1:]
    assert all(row.metrics["weights/canary_max_diff"] < 1e-3 for row in rows[1:])
    assert levels == [2, 2]
