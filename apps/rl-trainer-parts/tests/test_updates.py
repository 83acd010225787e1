"""The recorded updates of a step."""

from types import SimpleNamespace

import numpy as np
import pytest

from rl_core import Batch, Ragged, Trajectory
from rl_distill.learner import StepResult
from rl_metrics.reductions.recorder import Recorder
from rl_trainer_parts.learning.step import update


class Numbered:
    """A learner whose logprobs are the number of the update, counted from 1."""

    def __init__(self) -> None:
        self.step = 0

    def train_step(self, batch, *_, with_tokens, **__):
        assert with_tokens
        self.step += 1
        ids = batch.ragged("input_ids")
        said = Ragged(np.full(len(ids.values), self.step, dtype=np.float32), ids.offsets)
        return StepResult(
            step=self.step, loss=0.0, grad_norm=1.0, learning_rate=1.0, metrics={}, tokens={"policy_logprobs": said}
        )


def batch_of(num_groups: int) -> Batch:
    return Batch.from_trajectories(
        [
            Trajectory(
                prompt_uid=f"p{number % num_groups}",
                session_index=number // num_groups,
                input_ids=np.arange(2, dtype=np.int32),
                loss_mask=np.asarray([False, True]),
                rollout_logprobs=np.zeros(2, dtype=np.float32),
                policy_versions=np.asarray([-1, 0], dtype=np.int32),
                reward=1.0,
            )
            for number in range(2 * num_groups)
        ]
    )


@pytest.mark.parametrize(
    ("num_groups", "minibatches", "expected"),
    [(4, 1, [1] * 8), (4, 2, [1, 1, 2, 2] * 2), (4, 4, [1, 2, 3, 4] * 2), (2, 4, [1, 2] * 2)],
)
@pytest.mark.parametrize("epochs", [1, 3])
def test_tokens_are_told_as_they_were_in_their_first_update(num_groups, minibatches, expected, epochs, monkeypatch):
    monkeypatch.setattr("rl_trainer_parts.learning.step.make_objective", lambda *_: None)
    settings = SimpleNamespace(
        critic=SimpleNamespace(head_start_steps=0),
        trainer=SimpleNamespace(minibatches=minibatches, epochs=epochs),
        algorithm=SimpleNamespace(aggregation="token-mean"),
        rollout=SimpleNamespace(max_response_tokens=8, temperature=1.0),
        metrics=SimpleNamespace(log_rollouts=1),
    )
    parts = SimpleNamespace(
        settings=settings,
        learners=SimpleNamespace(critic=None, policy=Numbered()),
        skipped=SimpleNamespace(check=lambda *_, **__: None),
    )
    said = update(parts, batch_of(num_groups), Recorder(), step=0, kl_coefficient=0.0)  # type: ignore[arg-type]
    assert said["policy_logprobs"].values.reshape(-1, 2)[:, 1].tolist() == expected
