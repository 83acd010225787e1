"""What both trainers say of a step's batch."""

from types import SimpleNamespace

import numpy as np

from rl_core import Batch, Trajectory
from rl_metrics.reduction import Recorder
from rl_trainer.recording import record_distributions


def recorded(*, texts):
    length = 4
    is_trained = np.arange(length) >= 2
    one = Trajectory(
        prompt_uid="p",
        session_index=0,
        input_ids=np.arange(length, dtype=np.int32),
        loss_mask=is_trained,
        rollout_logprobs=np.where(is_trained, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(is_trained, 0, -1).astype(np.int32),
        finish_reason="stop",
        reward=0.5,
    )
    batch = Batch.from_trajectories([one])
    batch = batch.with_columns({"policy_logprobs": batch["rollout_logprobs"], "entropy": batch["rollout_logprobs"]})
    recorder = Recorder(strict=True)
    settings = SimpleNamespace(distillation=SimpleNamespace(texts=texts))
    record_distributions(settings, batch, recorder)  # type: ignore[arg-type]
    return {name.removeprefix("distribution/"): one for name, one in recorder.histograms().items()}


def test_a_steps_distributions():
    found = recorded(texts=None)
    assert {name: one.count for name, one in found.items()} == {
        "prompt_length": 1,
        "response_length": 1,
        "reward": 1,
        "entropy": 2,
        "logprob": 2,
        "log_ratio": 2,
    }
    assert found["logprob"].mean == -1.0
    assert found["log_ratio"].mean == 0.0


def test_texts_have_no_logprobs_of_an_engine():
    assert recorded(texts="answer").keys() == {"prompt_length", "response_length", "reward", "entropy"}
