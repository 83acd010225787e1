import numpy as np
import pytest

from rl_core.batch import Batch
from rl_core.errors import DataError, SettingsError
from rl_core.ragged import Ragged
from rl_core.records import Trajectory
from rl_distill.objectives import with_advantages, with_correction_weights, with_loss_weights


def trajectory(uid, session, output, reward, *, num_response):
    num_tokens = 1 + num_response
    mask = np.arange(num_tokens) > 0
    return Trajectory(
        prompt_uid=uid,
        session_index=session,
        output_index=output,
        input_ids=np.zeros(num_tokens, np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.zeros(num_tokens, np.int32),
        reward=reward,
    )


@pytest.fixture
def batch():
    return Batch.from_trajectories(
        [
            trajectory("b", 0, 1, 1.0, num_response=2),
            trajectory("a", 0, 0, 0.0, num_response=1),
            trajectory("b", 1, 0, 0.0, num_response=1),
            trajectory("a", 1, 0, 0.0, num_response=1),
            trajectory("b", 0, 0, 7.0, num_response=1),
        ]
    )


def test_advantages_by_prompt_and_session(batch):
    found = with_advantages(batch, advantage="dr_grpo").ragged("advantages")
    assert [row.tolist() for row in found] == [[0, 0.5, 0.5], [0, 0], [0, -0.5], [0, 0], [0, 0.5]]
    assert found.values.dtype == np.float32
    assert "advantages" not in batch


def test_options_reach_the_estimator(batch):
    found = with_advantages(batch, options={"eps": 1e6}).ragged("advantages").values
    assert float(np.abs(found).max()) == pytest.approx(0.5e-6, rel=1e-5)
    with pytest.raises(SettingsError, match="unknown option of advantage 'grpo': 'epsilon'"):
        with_advantages(batch, options={"epsilon": 1.0})


def test_missing_reward_is_refused():
    batch = Batch.from_trajectories([trajectory("a", 0, 0, None, num_response=1)])
    with pytest.raises(DataError, match=r"rows \[0\] of 1"):
        with_advantages(batch)


def test_loss_weights(batch):
    found = with_loss_weights(batch, aggregation="seq-mean-token-mean").ragged("loss_weights")
    expected = [[0, 0.1, 0.1], [0, 0.2], [0, 0.2], [0, 0.2], [0, 0.2]]
    for row, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(row, values, rtol=1e-6)
    with pytest.raises(SettingsError, match="Did you mean 'token-mean'"):
        with_loss_weights(batch, aggregation="token_mean")
    with pytest.raises(SettingsError, match="horizon"):
        with_loss_weights(batch, aggregation="seq-mean-token-sum-norm")


def test_correction_weights(batch):
    mask = batch.ragged("loss_mask")
    old = Ragged(np.where(mask.values, -1.0 + np.log(1.5), 0.0).astype(np.float32), mask.offsets)
    batch = batch.with_columns({"old_logprobs": old})
    found = with_correction_weights(batch, level="sequence", cap=2.0).ragged("correction_weights")
    np.testing.assert_allclose(found[0], [0, 2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(found[1], [0, 1.5], rtol=1e-6)
