import math
import pickle
from dataclasses import replace

import pytest
import torch

from rl_core.errors import DataError, SettingsError, ShapeError
from rl_distill.learner import MicroBatch
from rl_distill.objectives import PolicyObjectiveOptions, TokenLosses, policy_objective
from rl_distill.testing import check_objective, example_batch


def micro_of(offsets, **columns):
    num_tokens = offsets[-1]
    return MicroBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        position_ids=torch.zeros(num_tokens, dtype=torch.int64),
        offsets=torch.tensor(offsets),
        columns={
            name: torch.tensor(values, dtype=torch.bool if name == "loss_mask" else torch.float64)
            for name, values in columns.items()
        },
    )


BASE = {"loss_mask": [False, True, True], "loss_weights": [0.0, 0.5, 0.25], "advantages": [0.0, 2.0, -1.0]}
LOGPROBS = torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64)


def evaluate(options=None, *, logprobs=LOGPROBS, entropy=None, **columns):
    policy = logprobs.clone().requires_grad_()
    micro = micro_of([0, 3], **{**BASE, **columns})
    loss, sums = policy_objective(PolicyObjectiveOptions(**(options or {})))(policy, entropy, micro)
    return loss.detach(), torch.autograd.grad(loss, policy)[0], sums


def values_of(sums):
    return {name: (float(total), float(weight)) for name, (total, weight) in sums.items()}


def test_on_policy_loss_equals_a_literal():
    loss, gradient, sums = evaluate()
    assert float(loss) == pytest.approx(0.5 * -2.0 + 0.25 * 1.0)
    assert gradient.tolist() == pytest.approx([0.0, -1.0, 0.25])
    assert values_of(sums) == {
        "actor/pg_loss": (-0.75, 0.75),
        "actor/pg_clipfrac": (0.0, 2.0),
        "actor/pg_clipfrac_lower": (0.0, 2.0),
        "actor/ppo_kl": (0.0, 2.0),
    }


def test_old_logprobs_are_used_where_given():
    loss, gradient, sums = evaluate({"clip_high": 0.28}, old_logprobs=[9.0, -1.0 - math.log(2.0), -2.0])
    assert float(loss) == pytest.approx(0.5 * -2.0 * 1.28 + 0.25)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 0.25])
    assert values_of(sums)["actor/pg_clipfrac"] == (1.0, 2.0)
    assert values_of(sums)["actor/ppo_kl"] == pytest.approx((-math.log(2.0), 2.0))


def test_kl_and_entropy_equal_a_literal():
    entropy = torch.tensor([5.0, 1.0, 2.0], dtype=torch.float64)
    loss, _, sums = evaluate(
        {"kl_coefficient": 0.1, "kl_estimator": "k1", "entropy_coefficient": 0.01},
        entropy=entropy,
        reference_logprobs=[7.0, -1.5, -2.0],
    )
    assert float(loss) == pytest.approx(-0.75 + 0.1 * 0.5 * 0.5 - 0.01 * (0.5 * 1.0 + 0.25 * 2.0))
    assert values_of(sums)["actor/kl_loss"] == pytest.approx((0.25, 0.75))
    assert values_of(sums)["actor/entropy"] == pytest.approx((1.0, 0.75))


def test_reference_without_coefficient_is_a_metric_only():
    loss, gradient, sums = evaluate(reference_logprobs=[0.0, -3.0, -1.0])
    assert float(loss) == pytest.approx(-0.75)
    assert gradient.tolist() == pytest.approx([0.0, -1.0, 0.25])
    assert "actor/kl_loss" in sums


def test_correction_weights_multiply_the_policy_loss_alone():
    loss, gradient, _ = evaluate(
        {"kl_coefficient": 1.0, "kl_estimator": "k1"},
        correction_weights=[9.0, 2.0, 0.0],
        reference_logprobs=[0.0, -1.5, -2.0],
    )
    assert float(loss) == pytest.approx(0.5 * -2.0 * 2.0 + 0.5 * 0.5)
    assert gradient.tolist() == pytest.approx([0.0, -2.0 + 0.5, 0.25])


def test_correction_is_made_where_the_batch_has_none():
    rollout = [0.0, -1.0 - math.log(1.5), -2.0 + math.log(2.0)]
    _, gradient, sums = evaluate({"correction": "token"}, rollout_logprobs=rollout)
    assert gradient.tolist() == pytest.approx([0.0, -1.0 * 1.5, 0.25 * 0.5])
    assert values_of(sums)["rollout_corr/kl"] == pytest.approx((-math.log(1.5) + math.log(2.0), 2.0))
    _, gradient, _ = evaluate({"correction": "sequence"}, rollout_logprobs=rollout)
    assert gradient.tolist() == pytest.approx([0.0, -1.0 * 0.75, 0.25 * 0.75])
    _, gradient, _ = evaluate({"correction": "token", "correction_cap": 1.2}, rollout_logprobs=rollout)
    assert gradient.tolist() == pytest.approx([0.0, -1.0 * 1.2, 0.25 * 0.5])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": math.inf, "correction": "token"},
        {"correction": "sequence", "correction_cap": 1.3},
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_objectives_conform_to_the_rules(options, seed):
    check_objective(policy_objective(PolicyObjectiveOptions(**options)), seed=seed)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_objectives_conform_with_kl_and_entropy(estimator):
    options = PolicyObjectiveOptions(kl_coefficient=0.2, kl_estimator=estimator, entropy_coefficient=0.1)
    check_objective(policy_objective(options), is_regularized=True)


@pytest.mark.parametrize("missing", ["loss_mask", "loss_weights", "advantages"])
def test_missing_column_is_named(missing):
    example = example_batch()
    columns = {name: values for name, values in example.micro.columns.items() if name != missing}
    with pytest.raises(DataError, match=f"needs the column '{missing}'; the micro-batch has "):
        policy_objective(PolicyObjectiveOptions())(
            example.inputs["policy_logprobs"], None, replace(example.micro, columns=columns)
        )


def test_coefficient_without_its_input_is_refused():
    with pytest.raises(SettingsError, match=r"kl_coefficient is 0\.1, but the batch has no reference_logprobs"):
        evaluate({"kl_coefficient": 0.1})
    with pytest.raises(SettingsError, match=r"entropy_coefficient is 0\.1, .* with_entropy=True"):
        evaluate({"entropy_coefficient": 0.1})
    with pytest.raises(DataError, match="rollout_logprobs"):
        evaluate({"correction": "token"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_loss": "ppo_clp"}, "Did you mean 'ppo_clip'"),
        ({"kl_estimator": "k4"}, "unknown KL estimator 'k4'"),
        (
            {"clip_low": 2.0},
            r"clip_low of policy loss 'ppo_clip' must be a number of at least 0 and below 1; found 2.0",
        ),
        ({"policy_loss": "sapo", "clip_low": 0.2}, "unknown option of policy loss 'sapo': 'clip_low'"),
        (
            {"policy_loss": "kl_cov", "policy_loss_options": {"share": 2.0}},
            r"share of policy loss 'kl_cov' must be a number above 0 and at most 1; found 2.0",
        ),
        ({"policy_loss_options": {"clip": 0.1}}, "unknown option of policy loss 'ppo_clip': 'clip'"),
        ({"clip_low": 0.1, "policy_loss_options": {"clip_low": 0.1}}, "clip_low is set both as an option and in"),
        ({"correction": "tokens"}, "found 'tokens'"),
        ({"correction": "token", "correction_cap": 0.0}, r"correction_cap .* a number above 0; found 0.0"),
        (
            {"kl_coefficient": math.nan},
            r"kl_coefficient of PolicyObjectiveOptions.* a finite number of at least 0; found nan",
        ),
        ({"policy_loss_options": 3}, "policy_loss_options .* must be a mapping, a string to anything; found 3"),
        ({"kl_coefficient": -0.1}, "kl_coefficient .* found -0.1"),
        ({"entropy_coefficient": math.inf}, "entropy_coefficient .* found inf"),
        ({"old_logprobs": "logprobs"}, "old_logprobs .* one of 'old_logprobs', 'rollout_logprobs'; found 'logprobs'"),
    ],
)
def test_impossible_options_are_refused_at_once(options, message):
    with pytest.raises(SettingsError, match=message):
        policy_objective(PolicyObjectiveOptions(**options))


def test_wrong_shapes_are_refused():
    with pytest.raises(ShapeError, match="loss_weights must have shape"):
        evaluate(loss_weights=[1.0])
    with pytest.raises(ShapeError, match="old_logprobs must have shape"):
        evaluate(old_logprobs=[1.0])
    with pytest.raises(ShapeError, match="entropy must have shape"):
        evaluate(entropy=torch.zeros(2))
    objective = replace(
        policy_objective(PolicyObjectiveOptions()),
        policy_loss=lambda tokens: TokenLosses(losses=tokens.advantages.sum()),
    )
    with pytest.raises(ShapeError, match="losses of the policy loss must have shape"):
        objective(LOGPROBS, None, micro_of([0, 3], **BASE))


def test_micro_batch_without_trained_tokens_gives_zeros():
    loss, gradient, sums = evaluate(loss_mask=[False] * 3, rollout_logprobs=[math.nan] * 3)
    assert float(loss) == 0.0
    assert gradient.tolist() == [0.0, 0.0, 0.0]
    assert set(values_of(sums).values()) == {(0.0, 0.0)}


def test_another_kl_coefficient_changes_the_loss():
    objective = policy_objective(PolicyObjectiveOptions(kl_coefficient=0.1, kl_estimator="k1"))
    micro = micro_of([0, 3], **BASE, reference_logprobs=[0.0, -1.5, -2.0])
    losses = []
    for value in (0.0, 1.0):
        changed = replace(objective, options=replace(objective.options, kl_coefficient=value))
        losses.append(float(changed(LOGPROBS, None, micro)[0]))
    assert losses == pytest.approx([-0.75, -0.75 + 0.5 * 0.5])


def test_objective_travels_to_another_process():
    objective = policy_objective(PolicyObjectiveOptions(clip_high=0.28))
    assert pickle.loads(pickle.dumps(objective)).options == objective.options
