"""Arguments of objectives: lists and arrays become tensors; errors name invalid arguments."""

from functools import partial

import numpy as np
import pytest
import torch

from rl_core import Batch
from rl_core.errors import DataError, RLError, SettingsError, ShapeError
from rl_core.testing import make_trajectory
from rl_distill.objectives import (
    KL_ESTIMATORS,
    POLICY_LOSSES,
    PolicyTokens,
    TeacherTokens,
    aggregate,
    compute_policy_loss,
    dr_grpo_advantages,
    grpo_advantages,
    spread_rows,
    with_advantages,
    with_loss_weights,
)
from rl_distill.objectives import advantages as by_session
from rl_distill.objectives.aggregation import AGGREGATIONS, token_weights
from rl_distill.objectives.batch_advantages import masked_whiten
from rl_distill.objectives.correction import importance_ratios, importance_weights, mismatch_sums
from rl_distill.objectives.covariance_policy_loss import covariances
from rl_distill.objectives.micro_batches import masked
from rl_distill.objectives.registry import ADVANTAGES, BoundPolicyLoss, try_advantage, try_policy_loss
from rl_distill.objectives.rewarded_rows import RewardedRows
from rl_distill.objectives.value import value_losses

ESTIMATORS = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": by_session.rloo_advantages,
    "opo": partial(by_session.opo_advantages, num_tokens=[3, 1, 2, 2]),
    "gpg": by_session.gpg_advantages,
    "passk": by_session.passk_advantages,
}


@pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS)
def test_advantages_of_lists_and_arrays_are_those_of_tensors(estimate):
    rewards, group = [1.0, 0.0, 0.5, 0.0], [0, 0, 1, 1]
    expected = estimate(torch.tensor(rewards), torch.tensor(group))
    torch.testing.assert_close(estimate(rewards, group), expected, rtol=0, atol=0)
    of_arrays = estimate(np.array(rewards, np.float32), np.array(group))
    torch.testing.assert_close(of_arrays, expected, rtol=0, atol=0)


@pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize(
    ("rewards", "group", "said"),
    [
        ([[1.0], [0.0]], [0, 0], r"^rewards must have shape \[N\]; found \[2, 1\]\. Pass one value per traj"),
        ([1.0, 0.0, 0.0, 0.0], [0, 0], r"^group must have shape \[N\] like rewards, \[4\]; found \[2\]"),
        ("ab", [0, 0], r"^rewards of \w+ must be a Tensor; found 'ab' \(str\)"),
        (None, [0, 0], "must be a Tensor; found None"),
        ([1.0, [2.0]], [0, 0], "must be a Tensor"),
    ],
)
def test_what_gives_no_advantages_is_refused(estimate, rewards, group, said):
    with pytest.raises(ShapeError, match=said.replace("group must", "(group|num_tokens) must").replace("2]", "[24]]")):
        estimate(rewards, group)


def test_a_loop_may_be_of_lists():
    mask, logprobs = [[1, 1, 0]], torch.full((1, 3), -1.0, requires_grad=True)
    tokens = PolicyTokens.from_padded(logprobs, mask, advantages=[1.0], old_logprobs=[[-1.0, -1.0, 0.0]])
    loss, _ = compute_policy_loss(tokens)
    loss.backward()
    assert logprobs.grad.tolist() == [[-0.5, -0.5, 0.0]]
    kl = KL_ESTIMATORS.get("k3")([[-1.0, -1.0, 0.0]], np.full((1, 3), -1.0))
    assert float(aggregate(kl, mask)) == 0.0
    assert spread_rows([1.0, 2.0], [0, 1, 3], num_tokens=3).tolist() == [1.0, 2.0, 2.0]


BATCH = Batch.from_trajectories([make_trajectory("p", 0, reward=1.0), make_trajectory("p", 1, reward=0.0)])


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: compute_policy_loss(None),
            DataError,
            "tokens of compute_policy_loss must be a PolicyTokens",
        ),
        (
            lambda: compute_policy_loss(torch.zeros(2, 3, requires_grad=True)),
            DataError,
            r"float32 of shape \[2, 3\]\. Make one with PolicyTokens\.from_padded",
        ),
        (lambda: POLICY_LOSSES.get("ppo_clip")(3), DataError, "tokens of ppo_clip must be a PolicyTokens"),
        (lambda: POLICY_LOSSES.get("ppo_clip")(3, clip_low=2.0), SettingsError, "clip_low"),
        (lambda: ADVANTAGES.get("rloo")([1.0]), DataError, "rows of rloo must be a RewardedRows"),
        (lambda: PolicyTokens.from_padded([[0.0]], "a", advantages=[1.0]), ShapeError, "loss_mask .* a Tensor"),
        (
            lambda: PolicyTokens.from_padded([0.0], [1], advantages=[1.0]),
            ShapeError,
            r"must have shape \[B, T\]; found",
        ),
        (lambda: aggregate([1.0], [1]), ShapeError, r"loss_mask must have shape \[B, T\]; found \[1\]\. Pass rows"),
        (lambda: KL_ESTIMATORS.get("k1")("a", [0.0]), ShapeError, "policy_logprobs of k1 must be a Tensor"),
        (lambda: with_advantages([1.0]), DataError, "batch of with_advantages must be a Batch"),
        (lambda: with_loss_weights(None), DataError, "batch of with_loss_weights must be a Batch"),
    ],
)
def test_other_arguments_are_refused_by_name(call, error, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_no_gradient_goes_into_a_reference_or_a_teacher(name):
    policy, reference = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    KL_ESTIMATORS.get(name)(policy, reference).sum().backward()
    assert (policy.grad is not None, reference.grad) == (True, None)
    teacher = TeacherTokens.from_top_k(torch.tensor([[3]]), torch.tensor([[-0.5]], requires_grad=True))
    assert not teacher.logprobs.requires_grad


def test_an_advantage_with_a_gradient_is_told_what_to_call(monkeypatch):
    def learnt(rows):
        return {"advantages": torch.zeros(len(rows.loss_mask), requires_grad=True)}

    monkeypatch.setitem(ADVANTAGES._builtin, "learnt", learnt)
    with pytest.raises(RLError, match=r"Pass tensor\.detach\(\)"):
        with_advantages(BATCH, advantage="learnt")


def test_swapped_arguments_are_refused():
    with pytest.raises(ShapeError, match=r"group must be integer prompt indices, .* Are rewards and group swapped"):
        grpo_advantages(torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, 0.5, 0.2]))
    reference, policy = torch.tensor([-1.0]), torch.tensor([-2.0], requires_grad=True)
    with pytest.raises(DataError, match=r"nothing would train\. Are they swapped"):
        KL_ESTIMATORS.get("k3")(reference, policy)


@pytest.mark.parametrize("name", ["policy_logprobs", "old_logprobs"])
def test_probabilities_are_no_logprobs(name):
    given = {"policy_logprobs": torch.tensor([[-1.0, -2.0]]), "old_logprobs": torch.tensor([[-1.0, -2.0]])}
    given[name] = given[name].exp()
    with pytest.raises(DataError, match=rf"{name} must be at most 0; found 0\.3679\. Pass `log_softmax`"):
        PolicyTokens.from_padded(loss_mask=torch.tensor([[1, 1]]), advantages=torch.tensor([1.0]), **given)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("name", ["policy_logprobs", "loss_mask", "advantages", "old_logprobs"])
def test_nested_tensors_are_refused_with_what_to_do(layout, name):
    dense = torch.full((2, 3), -1.0)
    given = {"policy_logprobs": dense, "loss_mask": torch.ones(2, 3, dtype=torch.int64), "advantages": dense}
    given[name] = torch.nested.nested_tensor([torch.full((2,), -1.0), torch.full((3,), -1.0)], layout=layout)
    with pytest.raises(ShapeError, match=rf"{name} must be padded.*found a nested tensor.*to_padded_tensor"):
        PolicyTokens.from_padded(given.pop("policy_logprobs"), given.pop("loss_mask"), **given)


def checked_alike():
    """Yield (call, arguments, names of those that have one value a token) of functions on packed tokens."""
    ones, mask = torch.ones(3), torch.ones(3, dtype=torch.bool)
    yield covariances, {"logprobs": ones, "advantages": ones, "loss_mask": mask}
    yield value_losses, {"values": ones, "old_values": ones, "returns": ones}
    yield masked_whiten, {"values": ones, "mask": mask}
    yield (
        token_weights,
        {"loss_mask": mask, "offsets": torch.tensor([0, 3]), "row_weights": AGGREGATIONS.get("token-sum")},
    )
    yield masked, {"values": ones, "mask": mask, "name": "values"}
    packed = {"loss_mask": mask, "offsets": torch.tensor([0, 3])}
    yield partial(token_weights, row_weights=AGGREGATIONS.get("token-sum")), packed
    yield partial(importance_weights, level="token"), {"log_ratio": ones, **packed}
    yield partial(importance_ratios, level="token"), {"log_ratio": ones, **packed}
    yield mismatch_sums, {"old_logprobs": ones, "rollout_logprobs": ones, **packed}
    yield PolicyTokens, {"policy_logprobs": ones, "old_logprobs": ones, "advantages": ones, **packed}
    index = torch.arange(3)
    rows = dict.fromkeys(("group", "session", "output"), index)
    yield RewardedRows, {"rewards": ones, **rows, "loss_mask": mask, "offsets": torch.arange(4), "columns": {"a": ones}}
    yield opo_of, {"rewards": ones, "group": index, "num_tokens": index}


def opo_of(rewards, group, num_tokens):
    return by_session.opo_advantages(rewards, group, num_tokens)


@pytest.mark.parametrize(("call", "given"), [*checked_alike()])
def test_one_argument_of_another_shape_or_dtype_is_refused(call, given):
    call(**given)
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            continue
        wrong = [value[:1], value[:, None], value[None]]
        wrong += [value.float()] if value.dtype == torch.bool and call is not masked else []
        wrong += [value + 1, value.flip(0), value.int(), torch.tensor([0, 2, 1, 3])] if name == "offsets" else []
        for other in wrong:
            with pytest.raises(ShapeError, match=r"must (have|run)|offsets must be"):
                call(**{**given, name: other})
    if call is RewardedRows:
        for name in ("columns", "row_columns"):
            with pytest.raises(ShapeError, match="a must have shape"):
                call(**{**given, name: {"a": torch.ones(2)}})
        for rewards in (torch.tensor([1.0, torch.inf, torch.nan]), torch.tensor([1.0, -torch.inf, torch.nan])):
            with pytest.raises(DataError, match=r"rows \[1, 2\] of 3 are not"):
                call(**{**given, "rewards": rewards})


def test_functions_are_tried_on_what_trains():
    seen = []

    def mine(tokens, *, power: float = 1.0):
        seen.append(tokens)
        return tokens.advantages**power

    def select(old_logprobs, advantages, loss_mask):
        return loss_mask

    try_policy_loss(BoundPolicyLoss(loss=mine, select=None))
    try_policy_loss(BoundPolicyLoss(loss=mine, select=select))
    assert [one.loss_mask.tolist() for one in seen] == [[True], [True]]
    assert [one.offsets.tolist() for one in seen] == [[0, 1]] * 2
    assert (seen[0].selection, seen[1].selection.tolist()) == (None, [True])
    with pytest.raises(SettingsError, match="the policy loss fails with its options: "):
        try_policy_loss(BoundPolicyLoss(loss=partial(mine, power="2"), select=None))


def test_an_estimator_is_tried_on_two_sessions_of_one_prompt(monkeypatch):
    seen = []

    def mine(rows, *, weights=None, power: float = 1.0):
        seen.append(rows)
        return {"advantages": rows.rewards**power}

    monkeypatch.setitem(ADVANTAGES._builtin, "mine", mine)
    try_advantage("mine", {"weights": {"style": 1.0}})
    (rows,) = seen
    assert (rows.group.tolist(), rows.session.tolist(), rows.output.tolist()) == ([0, 0], [0, 1], [0, 0])
    assert (rows.loss_mask.tolist(), rows.offsets.tolist(), rows.rewards.tolist()) == ([True] * 2, [0, 1, 2], [0.0] * 2)
    assert set(rows.columns) == {"values", "old_logprobs", "sum_pi_squared"}
    assert set(rows.row_columns) == {"reward_baseline", "reward/style"}
    try_advantage("mine", {})
    assert set(seen[-1].row_columns) == {"reward_baseline", "reward/any"}
    monkeypatch.setitem(ADVANTAGES._builtin, "fails", lambda rows: rows.rewards + "a")
    with pytest.raises(SettingsError, match=r"advantage 'fails' fails with the options \{\}: "):
        try_advantage("fails", {})
