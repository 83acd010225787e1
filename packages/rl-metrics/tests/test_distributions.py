import math

import numpy as np
import pytest

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.data.records import Timings, Trajectory
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions.distributions import batch_distributions, timing_distributions
from rl_metrics.reductions.recorder import Recorder


def trajectory(uid, session, *, num_prompt, mask, reward):
    length = num_prompt + len(mask)
    is_trained = np.asarray([False] * num_prompt + [bool(one) for one in mask])
    return Trajectory(
        prompt_uid=uid,
        session_index=session,
        input_ids=np.arange(length, dtype=np.int32),
        loss_mask=is_trained,
        rollout_logprobs=np.where(is_trained, -np.arange(length, dtype=np.float32), 0).astype(np.float32),
        policy_versions=np.where(is_trained, 0, -1).astype(np.int32),
        finish_reason="stop",
        reward=reward,
    )


def example():
    return Batch.from_trajectories(
        [
            trajectory("a", 0, num_prompt=2, mask=[1, 1], reward=1.0),
            trajectory("a", 1, num_prompt=2, mask=[1, 0, 1], reward=0.0),
            trajectory("b", 0, num_prompt=1, mask=[1], reward=0.5),
            trajectory("c", 0, num_prompt=1, mask=[0], reward=None),
        ]
    )


def with_columns(batch, **columns):
    mask = batch.ragged("loss_mask")
    filled = {
        name: Ragged(np.where(mask.values, np.float32(value), np.float32(9)), mask.offsets)
        for name, value in columns.items()
    }
    return batch.with_columns(filled)


def test_distributions_equal_hand_computed_ones():
    found = {name: values.tolist() for name, values in batch_distributions(example()).items()}
    assert found == {
        "distribution/prompt_length": [2, 2, 1, 2],
        "distribution/response_length": [2, 3, 1, 0],
        "distribution/reward": [1.0, 0.0, 0.5],
        "distribution/group_reward_std": [0.5],
        "distribution/logprob": [-2.0, -3.0, -2.0, -4.0, -1.0],
    }


def test_token_columns_count_where_tokens_train():
    batch = with_columns(example(), advantages=0.25, entropy=0.75, correction_weights=2.0, policy_logprobs=-1.5)
    found = batch_distributions(batch)
    assert found["distribution/advantage"].tolist() == [0.25] * 5
    assert found["distribution/entropy"].tolist() == [0.75] * 5
    assert found["distribution/correction_weight"].tolist() == [2.0] * 5
    assert found["distribution/log_ratio"].tolist() == [0.5, 1.5, 0.5, 2.5, -0.5]
    recomputed = with_columns(batch, old_logprobs=-1.0)
    assert batch_distributions(recomputed)["distribution/log_ratio"].tolist() == [1.0, 2.0, 1.0, 3.0, 0.0]
    without_engine = recomputed.only(recomputed.names - {"rollout_logprobs"})
    assert "distribution/log_ratio" not in batch_distributions(without_engine)


def test_impossible_logprobs_are_counted_as_not_finite():
    batch = with_columns(example(), old_logprobs=-math.inf, rollout_logprobs=-math.inf)
    recorder = Recorder(strict=True)
    recorder.record_distributions(batch_distributions(batch))
    found = recorder.reduce()
    assert {name: count for name, count in found.items() if name.startswith("nonfinite/")} == {
        "nonfinite/distribution/log_ratio": 5.0,
        "nonfinite/distribution/logprob": 5.0,
    }


def test_batches_without_rows_rewards_or_trained_tokens():
    assert batch_distributions(example().select([])) == {}
    untrained = batch_distributions(example().select([3]))
    assert {name: values.tolist() for name, values in untrained.items()} == {
        "distribution/prompt_length": [2],
        "distribution/response_length": [0],
    }


def test_what_a_batch_lacks_has_no_distribution():
    batch = example()
    found, without = (batch_distributions(one) for one in (batch, batch.only(batch.names - {"reward"})))
    assert found.keys() - without.keys() == {"distribution/reward", "distribution/group_reward_std"}


def test_timings_are_listed_by_session():
    assert timing_distributions([]) == {}
    found = timing_distributions([Timings(generate_s=1.0, tools_s=2.0, reward_s=0.5), Timings(generate_s=3.0)])
    assert {name: values.tolist() for name, values in found.items()} == {
        "distribution/generate_s": [1.0, 3.0],
        "distribution/tools_s": [2.0, 0.0],
        "distribution/reward_s": [0.5, 0.0],
    }


@pytest.mark.parametrize("found", [batch_distributions(example()), timing_distributions([Timings()])])
def test_every_name_is_a_histograms(found):
    for name in found:
        assert DEFINITIONS.lookup(name).reduction == "histogram"
