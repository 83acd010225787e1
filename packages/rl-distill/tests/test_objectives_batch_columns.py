import math

import numpy as np
import pytest
import torch

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.data.records import Trajectory
from rl_core.errors import DataError, SettingsError
from rl_distill.objectives import (
    PolicyObjectiveOptions,
    policy_loss_with_options,
    policy_objective,
    with_advantages,
    with_correction_weights,
    with_kl_in_reward,
    with_loss_weights,
    with_rejection,
    with_reward_components,
    with_token_selection,
    without_truncated,
)
from rl_distill.objectives.batch_columns import correction_weight_metrics, mean_reference_kl
from rl_distill.packing import pack_batch


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


def test_advantages_are_centered_by_prompt_and_session(batch):
    found = with_advantages(batch, advantage="dr_grpo").ragged("advantages")
    assert [row.tolist() for row in found] == [[0, 0.5, 0.5], [0, 0], [0, -0.5], [0, 0], [0, 0.5]]
    assert found.values.dtype == np.float32
    assert "advantages" not in batch


def test_columns_of_several_values_a_token_are_passed_over(batch):
    mask = batch.ragged("loss_mask")
    several = Ragged(np.zeros((len(mask.values), 3), np.float32), mask.offsets)
    ids = Ragged(np.zeros((len(mask.values), 3), np.int32), mask.offsets)
    taught = batch.with_columns({"teacher_logprobs": several, "teacher_ids": ids})
    found, expected = (with_advantages(one).ragged("advantages").values for one in (taught, batch))
    np.testing.assert_array_equal(found, expected)


def test_options_reach_the_estimator(batch):
    found = with_advantages(batch, options={"eps": 1e6}).ragged("advantages").values
    assert float(np.abs(found).max()) == pytest.approx(0.5e-6, rel=1e-5)
    with pytest.raises(SettingsError, match="unknown option of advantage 'grpo': 'epsilon'"):
        with_advantages(batch, options={"epsilon": 1.0})


def test_missing_reward_is_refused():
    batch = Batch.from_trajectories([trajectory("a", 0, 0, None, num_response=1)])
    with pytest.raises(DataError, match=r"rows \[0\] of 1"):
        with_advantages(batch)


def test_loss_weights_equal_literals(batch):
    found = with_loss_weights(batch, aggregation="seq-mean-token-mean").ragged("loss_weights")
    expected = [[0, 0.1, 0.1], [0, 0.2], [0, 0.2], [0, 0.2], [0, 0.2]]
    for row, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(row, values, rtol=1e-6)
    with pytest.raises(SettingsError, match="Did you mean 'token-mean'"):
        with_loss_weights(batch, aggregation="token_mean")
    with pytest.raises(SettingsError, match="horizon"):
        with_loss_weights(batch, aggregation="seq-mean-token-sum-norm")


def test_correction_weights_equal_literals(batch):
    mask = batch.ragged("loss_mask")
    old = Ragged(np.where(mask.values, -1.0 + np.log(1.5), 0.0).astype(np.float32), mask.offsets)
    batch = batch.with_columns({"old_logprobs": old})
    found = with_correction_weights(batch, level="sequence", cap=2.0).ragged("correction_weights")
    np.testing.assert_allclose(found[0], [0, 2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(found[1], [0, 1.5], rtol=1e-6)


def with_column(batch, name, values):
    """Add a token column with these values at trained tokens, and 0 elsewhere."""
    mask = batch.ragged("loss_mask")
    column = np.zeros(len(mask.values), np.float32)
    column[mask.values] = values
    return batch.with_columns({name: Ragged(column, mask.offsets)})


def test_banded_correction_weights_and_their_metrics(batch):
    batch = with_column(batch, "old_logprobs", -1.0 + np.log([4.0, 1.0, 0.1, 1.0, 1.0, 1.0]))
    found = with_correction_weights(batch, level="token", cap=2.0, floor=0.5)
    weights = found.ragged("correction_weights").values
    np.testing.assert_allclose(weights[batch.ragged("loss_mask").values], [0, 1, 0, 1, 1, 1], rtol=1e-6)
    metrics = correction_weight_metrics(found, level="token", cap=2.0, floor=0.5)
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 6)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 6)


def test_rejected_tokens_leave_the_loss_mask_alone(batch):
    batch = with_column(batch, "old_logprobs", -1.0 + np.log([4.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    found, metrics = with_rejection(with_advantages(batch), bounds={"token_k1": 2.0})
    assert found.ragged("loss_mask")[0].tolist() == [False, False, True]
    assert batch.ragged("loss_mask")[0].tolist() == [False, True, True]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 6)
    assert with_loss_weights(found).ragged("loss_weights")[0].tolist() == pytest.approx([0.0, 0.0, 0.2])
    with pytest.raises(SettingsError, match="unknown rejection criterion 'token_k4'"):
        with_rejection(batch, bounds={"token_k4": 2.0})


def test_kl_in_the_reward_lowers_token_rewards(batch):
    batch = with_column(batch, "old_logprobs", [-1.0] * 6)
    batch = with_column(batch, "reference_logprobs", [-1.5, -1.0, -1.0, -1.0, -1.0, -1.0])
    assert mean_reference_kl(batch, estimator="k1") == pytest.approx(0.5 / 6)
    found = with_kl_in_reward(batch, coefficient=0.2)
    assert found.ragged("token_rewards")[0].tolist() == pytest.approx([0.0, -0.1, 0.0])
    advantages = with_advantages(found, advantage="dr_grpo").ragged("advantages")
    assert advantages[0].tolist() == pytest.approx([0.0, 0.45, 0.45])  # session rewards 1 - 0.1 and 0
    of_engine = with_kl_in_reward(batch, coefficient=0.2, policy_logprobs="rollout_logprobs")
    assert of_engine.ragged("token_rewards")[0].tolist() == pytest.approx([0.0, -0.1, 0.0])


def test_session_rules_by_name(batch):
    found = with_advantages(batch, advantage="dr_grpo", session_rule="last_only").ragged("advantages")
    assert [row.tolist() for row in found] == [[0, 0.5, 0.5], [0, 0], [0, -0.5], [0, 0], [0, 0]]
    with pytest.raises(SettingsError, match=r"unknown session rule 'lst'. Did you mean 'last'"):
        with_advantages(batch, session_rule="lst")


def test_reward_components_reach_gdpo(batch):
    named = [{"style": style, "length": 1.0} for style in (1.0, 0.0, 0.0, 1.0, 5.0)]
    found = with_advantages(with_reward_components(batch, named), advantage="gdpo").ragged("advantages")
    assert found[0][1] == found[0][2] == found[3][1] > 0 > found[1][1] == found[2][1]
    assert found[4][1] == found[0][1], "of a session the last trajectory counts"
    with pytest.raises(DataError, match="row 1 lacks the reward component 'style'"):
        with_reward_components(batch, [named[0], {"length": 1.0}, *named[2:]])
    with pytest.raises(DataError, match=r"one entry per row \(5 rows\); found 1"):
        with_reward_components(batch, named[:1])


def test_remax_reads_the_baseline(batch):
    found = batch.with_columns({"reward_baseline": np.full(5, 0.25, np.float32)})
    assert with_advantages(found, advantage="remax").ragged("advantages")[0].tolist() == [0.0, 0.75, 0.75]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_selection_is_the_same_for_any_micro_batches(name):
    random = np.random.default_rng(0)
    rows = [trajectory(str(i % 3), i, 0, float(random.random()), num_response=5 + i) for i in range(9)]
    batch = with_loss_weights(with_advantages(Batch.from_trajectories(rows)))
    batch = with_column(batch, "old_logprobs", -1.0 - random.random(int(batch.ragged("loss_mask").values.sum())))
    options = {"share": 0.2} | ({"low": 0.01} if name == "clip_cov" else {})
    select = policy_loss_with_options(name, options).select
    batch = with_token_selection(batch, select=select)
    assert 0 < int(batch.ragged("token_selection").values.sum()) <= 0.2 * int(batch.ragged("loss_mask").values.sum())
    objective = policy_objective(PolicyObjectiveOptions(policy_loss=name, policy_loss_options=options))
    found = []
    for max_tokens in (1, 20, 1000):
        losses = []
        for pack in pack_batch(batch, max_tokens=max_tokens, device=torch.device("cpu")):
            micro = pack.micro_batch
            policy = (micro.columns["old_logprobs"] + 0.1 * micro.position_ids.sin()).requires_grad_()
            loss, _ = objective(policy, None, micro)
            losses.append((loss.item(), torch.autograd.grad(loss, policy)[0].double().square().sum().item()))
        found.append([math.fsum(column) for column in zip(*losses, strict=True)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            with_kl_in_reward,
            {"coefficient": float("nan")},
            r"coefficient of with_kl_in_reward .* a finite number of at least 0; found nan",
        ),
        (with_kl_in_reward, {"coefficient": -0.1}, "coefficient of with_kl_in_reward .* found -0.1"),
        (with_kl_in_reward, {"coefficient": 0.1, "policy_logprobs": "logprobs"}, "one of 'old_logprobs', 'rollout_"),
        (with_correction_weights, {"level": "row"}, "level of with_correction_weights .* found 'row'"),
        (with_correction_weights, {"level": "token", "cap": "2"}, "cap of with_correction_weights .* found '2'"),
        (
            with_correction_weights,
            {"level": "token", "floor": 0.0},
            r"floor .* a finite number above 0 or None; found 0.0",
        ),
        (with_correction_weights, {"level": "token", "cap": 2.0, "floor": 3.0}, "floor <= cap; found"),
        (with_loss_weights, {"horizon": 0}, "horizon of with_loss_weights must be a whole number of at least 1"),
    ],
)
def test_impossible_options_are_refused(batch, function, options, message):
    batch = batch.with_columns({"old_logprobs": batch["rollout_logprobs"]})
    with pytest.raises(SettingsError, match=message):
        function(batch, **options)


def cut(batch, *is_truncated):
    return batch.with_columns({"is_truncated": np.array(is_truncated)})


def test_a_session_whose_last_trajectory_is_truncated_trains_nothing(batch):
    # Rows: b/0/1, a/0/0, b/1/0, a/1/0, b/0/0. The last of session b/0 is the first row.
    masked, share = without_truncated(cut(batch, True, False, False, True, False))
    assert [row.tolist() for row in masked.ragged("loss_mask")] == [[0, 0, 0], [0, 1], [0, 1], [0, 0], [0, 0]]
    assert share == 3 / 5


def test_a_session_that_went_on_after_a_truncated_trajectory_trains_whole(batch):
    masked, share = without_truncated(cut(batch, False, False, False, False, True))
    assert masked.ragged("loss_mask").values.tolist() == batch.ragged("loss_mask").values.tolist()
    assert share == 0.0


def test_truncated_sessions_count_in_the_advantages_and_not_in_the_loss(batch):
    whole = with_advantages(cut(batch, True, False, False, False, False), advantage="dr_grpo")
    weighted = with_loss_weights(without_truncated(whole)[0], aggregation="token-mean")
    weights = [row.tolist() for row in weighted.ragged("loss_weights")]
    assert weights == [pytest.approx(one) for one in ([0, 0, 0], [0, 1 / 3], [0, 1 / 3], [0, 1 / 3], [0, 0])]
    assert weighted.ragged("advantages")[2].tolist() == [0, -0.5], "compared with the truncated session's reward"


def test_all_may_be_truncated(batch):
    masked, share = without_truncated(cut(batch, True, True, True, True, True))
    assert (share, masked.ragged("loss_mask").values.any()) == (1.0, False)


def test_nothing_of_no_rows_is_truncated(batch):
    empty = cut(batch, *[True] * 5).select(np.zeros(0, np.int64))
    masked, share = without_truncated(empty)
    assert (len(masked), share) == (0, 0.0)


def test_what_is_left_out_is_the_documented_default(batch):
    batch = with_column(batch, "old_logprobs", -1.0 + np.log([4.0, 1.0, 0.1, 1.0, 1.0, 1.0]))
    batch = with_column(batch, "reference_logprobs", [-1.5, -0.5, -1.0, -1.0, -2.0, -1.0])
    batch = with_advantages(batch)
    select = policy_loss_with_options("kl_cov", {"share": 0.3}).select
    weigh, metrics = with_correction_weights, correction_weight_metrics
    pairs = [
        (with_advantages(batch), with_advantages(batch, advantage="grpo", session_rule="last")),
        (with_loss_weights(batch), with_loss_weights(batch, aggregation="token-mean")),
        (weigh(batch, level="token"), weigh(batch, level="token", cap=2.0)),
        (
            with_kl_in_reward(batch, coefficient=1.0),
            with_kl_in_reward(batch, coefficient=1.0, estimator="k1", policy_logprobs="old_logprobs"),
        ),
        (
            with_token_selection(batch, select=select),
            with_token_selection(batch, select=select, policy_logprobs="old_logprobs"),
        ),
    ]
    for found, expected in pairs:
        assert found.names == expected.names
        for name in found.names - {"reward"}:
            assert not isinstance(found[name], Ragged) or np.array_equal(found[name].values, expected[name].values)
    weighted = weigh(batch, level="token", cap=2.0)
    assert metrics(weighted, level="token") == metrics(weighted, level="token", cap=2.0, floor=None)
    assert mean_reference_kl(batch) == mean_reference_kl(batch, estimator="k3", policy_logprobs="old_logprobs")
