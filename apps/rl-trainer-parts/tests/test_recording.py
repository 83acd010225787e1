"""Metrics of a step's batch in both trainers."""

import numpy as np

from rl_core import Batch, Trajectory
from rl_metrics.reductions.distributions import batch_distributions
from rl_metrics.reductions.recorder import Recorder
from rl_trainer_parts.learning.step import with_update


def batch_of_one() -> Batch:
    """Return a trajectory of two prompt tokens and two trained ones."""
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
    return Batch.from_trajectories([one])


def recorded(batch):
    recorder = Recorder(strict=True)
    recorder.record_distributions(batch_distributions(batch))
    return {name.removeprefix("distribution/"): one for name, one in recorder.histograms().items()}


def said_of(batch):
    return {"policy_logprobs": batch["rollout_logprobs"], "entropy": batch["rollout_logprobs"]}


def test_a_steps_distributions():
    batch = batch_of_one()
    found = recorded(batch.with_columns(said_of(batch)))
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
    batch = batch_of_one()
    texts = batch.only(batch.names - {"rollout_logprobs"})  # like prepared texts
    found = recorded(texts.with_columns(said_of(batch)))
    assert found.keys() == {"prompt_length", "response_length", "reward", "entropy"}


def test_tokens_that_the_correction_rejected_were_not_scored():
    batch = batch_of_one()
    mask = batch.ragged("loss_mask")
    rejected = batch.with_columns({"loss_mask": type(mask)(np.arange(4) == 3, mask.offsets)})
    trained = with_update(rejected, said_of(batch), loss_mask=mask)
    assert trained.ragged("loss_mask").values.tolist() == [False, False, True, True]
    for name in ("policy_logprobs", "entropy"):
        np.testing.assert_array_equal(trained.ragged(name).values, np.float32([0, 0, np.nan, -1]))
    found = recorded(trained)
    assert {name: found[name].count for name in ("logprob", "entropy", "log_ratio")} == {
        "logprob": 2,
        "entropy": 1,
        "log_ratio": 1,
    }
    assert all(one.num_nonfinite == 0 for one in found.values())
