"""A run whose engine drops its weights in each step learns what one learns whose engine stays awake."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from tiny_run import make_tiny_run, train_here

from rl_metrics.trackers.jsonl import read_metrics
from rl_rollout.engines.transformers_stepper import TransformersStepper


def test_an_engine_that_drops_its_weights_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, levels = [], list[int]()
    sleep, traits = TransformersStepper.sleep, TransformersStepper.traits.fget

    def noted(stepper: TransformersStepper, level: Literal[1, 2]) -> None:
        levels.append(level)
        sleep(stepper, level)

    monkeypatch.setattr(TransformersStepper, "sleep", noted)
    sleepy: Any = property(lambda stepper: replace(traits(stepper), can_sleep=True))
    monkeypatch.setattr(TransformersStepper, "traits", sleepy)
    for number, words in enumerate(({}, {"rollout__sleep": True, "rollout__sleep_keeps_weights": False})):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = make_tiny_run(folder)
        assert train_here(run, trainer__steps=2, **words) == 0
        rows = read_metrics(run.run_folder / "metrics.jsonl")
        rewards.append([(row.metrics["actor/loss"], row.metrics["actor/grad_norm"]) for row in rows[1:]])
    assert rewards[0] == rewards[1]
    assert set(levels) == {2}
    assert len(levels) >= 2
