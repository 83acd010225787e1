"""The mismatch with and without replay, on a sample of a step's trajectories."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_core import Batch, Ragged
from rl_core.testing import make_trajectory
from rl_metrics.reductions import Recorder
from rl_trainer_parts.learning.step import record_replay
from rl_trainer_parts.settings.schema import MetricSettings

EXPERTS = np.zeros((5, 2, 2), np.int16)


class Learner:
    """Logprobs are off by 0.1 nats with the engine's experts and by 0.5 without; records its batches."""

    def __init__(self) -> None:
        self.asked: list[Batch] = []

    def logprobs(self, batch: Batch, *, temperature: float) -> Ragged:
        assert temperature == 0.7
        self.asked.append(batch)
        rollout = batch.ragged("rollout_logprobs")
        off = np.float32(0.1 if "routed_experts" in batch else 0.5)
        return Ragged(rollout.values + off, rollout.offsets)


def recorded(rows: Batch, *, step: int = 1, **metrics: int) -> tuple[dict[str, float], list[Batch]]:
    learner, recorder = Learner(), Recorder(strict=True)
    chosen = MetricSettings(**({"details_every": 5, "replay_rows": 4} | metrics))
    settings = SimpleNamespace(metrics=chosen, rollout=SimpleNamespace(temperature=0.7))
    parts: Any = SimpleNamespace(settings=settings, learners=SimpleNamespace(policy=learner))
    record_replay(parts, rows, recorder, step=step)
    return dict(recorder.reduce()), learner.asked


def rows_of(num_groups: int, **fields: Any) -> Batch:
    return Batch.from_trajectories(
        [make_trajectory(f"p{index // 4}", index % 4, **fields) for index in range(4 * num_groups)]
    )


def test_both_are_measured_on_a_few_trajectories_of_all_groups():
    found, asked = recorded(rows_of(8, routed_experts=EXPERTS))

    assert found["router/logprobs_diff_mean/replay"] == pytest.approx(0.1, rel=1e-5)
    assert found["router/logprobs_diff_mean/no_replay"] == pytest.approx(0.5, rel=1e-5)
    assert found["router/k3_kl/replay"] == pytest.approx(np.expm1(0.1) - 0.1, rel=1e-4)
    assert found["router/k3_kl/no_replay"] == pytest.approx(np.expm1(0.5) - 0.5, rel=1e-4)
    assert [["routed_experts" in batch, len(batch)] for batch in asked] == [[True, 4], [False, 4]]
    assert [key[:2] for key in asked[0].keys] == [("p0", 0), ("p2", 2), ("p5", 0), ("p7", 3)]


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        ({"routed_experts": EXPERTS}, {"step": 2}),
        ({"routed_experts": EXPERTS}, {"replay_rows": 0}),
        ({"routed_experts": EXPERTS}, {"details_every": 0}),
        ({"routed_experts": EXPERTS, "loss_mask": np.zeros(5, np.bool_)}, {}),
    ],
)
def test_nothing_is_computed_where_it_is_not_due(fields: dict[str, Any], changes: dict[str, int]):
    assert recorded(rows_of(1, **fields), **changes) == ({}, [])


def test_steps_that_are_due_are_counted_from_the_first():
    rows = rows_of(1, routed_experts=EXPERTS)
    assert [step for step in range(1, 12) if recorded(rows, step=step)[1]] == [1, 6, 11]
