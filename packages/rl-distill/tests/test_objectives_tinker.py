"""The Tinker API's losses, compared with its documented formulas written out for one datum after the other."""

import itertools
import math

import pytest
import torch

from rl_core.errors import SettingsError
from rl_distill.learner import MicroBatch
from rl_distill.objectives import AGGREGATIONS, TINKER_LOSSES, PolicyTokens, tinker_objective
from rl_distill.objectives.aggregation import token_weights
from rl_distill.objectives.tinker import unclipped_ratio

LENGTHS = (5, 1, 8, 3)
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
TOTAL = int(OFFSETS[-1])


def clipped(datum, *, low, high):
    ratio = torch.exp(datum["target"] - datum["sampling"])
    return -torch.minimum(ratio * datum["advantages"], ratio.clamp(low, high) * datum["advantages"]).sum()


def sequence_clipped(datum, *, low, high):
    differences = (datum["target"].detach() - datum["sampling"])[datum["selection"]]
    mean = differences.mean() if len(differences) else torch.zeros((), dtype=torch.float64)
    ratio = torch.exp(mean + datum["target"] - datum["target"].detach())
    return -torch.minimum(ratio * datum["advantages"], ratio.clamp(low, high) * datum["advantages"]).sum()


def cispo(datum, *, low, high):
    weight = torch.exp(datum["target"] - datum["sampling"]).clamp(low, high).detach()
    return -(weight * datum["target"] * datum["advantages"]).sum()


def dro(datum, *, beta):
    penalty = (datum["target"] - datum["sampling"]) ** 2
    return -(datum["target"] * datum["advantages"] - 0.5 * beta * penalty).sum()


def importance(datum):
    return -(torch.exp(datum["target"] - datum["sampling"]) * datum["advantages"]).sum()


BOUNDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
CASES = {
    "cross_entropy": ("cross_entropy", {}, lambda datum: -(datum["target"] * datum["weights"]).sum()),
    "importance_sampling": ("importance_sampling", {}, importance),
    "ppo": ("ppo", {}, lambda datum: clipped(datum, low=0.8, high=1.2)),
    "ppo, narrow": ("ppo", BOUNDS, lambda datum: clipped(datum, low=0.9, high=1.05)),
    "cispo": ("cispo", {}, lambda datum: cispo(datum, low=0.8, high=1.2)),
    "cispo, one side": (
        "cispo",
        {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        lambda datum: cispo(datum, low=0.0, high=4.0),
    ),
    "dro": ("dro", {"beta": 0.3}, lambda datum: dro(datum, beta=0.3)),
    "gspo": ("gspo", BOUNDS, lambda datum: sequence_clipped(datum, low=0.9, high=1.05)),
    "gspo, its paper's": ("gspo", {}, lambda datum: sequence_clipped(datum, low=1 - 3e-4, high=1 + 4e-4)),
}


def columns(seed):
    random = torch.Generator().manual_seed(seed)

    def numbers(scale):
        return torch.randn(TOTAL, generator=random, dtype=torch.float64) * scale

    target = -numbers(1.5).abs()
    made = {"target": target.clone(), "sampling": target + numbers(0.3), "advantages": numbers(1.0)}
    made["selection"] = torch.rand(TOTAL, generator=random) < 0.7
    made["weights"] = numbers(1.0)
    return made


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_the_documented_formulas(case, seed):
    name, config, formula = CASES[case]
    made = columns(seed)
    target = made["target"].requires_grad_()
    mask = torch.ones(TOTAL, dtype=torch.bool)
    sums = token_weights(mask, OFFSETS, row_weights=AGGREGATIONS.get("token-sum")).double()
    micro = MicroBatch(
        input_ids=torch.zeros(TOTAL, dtype=torch.int64),
        position_ids=torch.zeros(TOTAL, dtype=torch.int64),
        offsets=OFFSETS,
        columns={
            "loss_mask": mask,
            "loss_weights": made["weights"] if name == "cross_entropy" else sums,
            "rollout_logprobs": made["sampling"],
            "advantages": made["advantages"],
        }
        | ({"token_selection": made["selection"]} if name == "gspo" else {}),
    )
    loss, metrics = tinker_objective(name, config)(target, None, micro)
    if name != "cross_entropy":
        torch.testing.assert_close(metrics["actor/ppo_kl"][0], (made["sampling"] - target).detach().sum())
    (found,) = torch.autograd.grad(loss, target)

    rows = [slice(int(a), int(b)) for a, b in itertools.pairwise(OFFSETS)]
    expected = sum(formula({key: values[row] for key, values in made.items()}) for row in rows)
    (gradient,) = torch.autograd.grad(expected, target)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-6)


def test_the_metric_of_a_ratio_without_clip_has_no_gradient():
    logprobs, zeros = torch.zeros(2, requires_grad=True), torch.zeros(2)
    tokens = PolicyTokens(
        policy_logprobs=logprobs,
        old_logprobs=zeros,
        advantages=zeros,
        loss_mask=zeros == 0,
        offsets=torch.tensor([0, 2]),
    )
    found = unclipped_ratio(tokens)
    assert found.losses.requires_grad
    assert not found.diagnostics["actor/ppo_kl"].requires_grad


def test_losses_equal_literals():
    ones = torch.ones(1, dtype=torch.bool)
    target = torch.tensor([math.log(0.3)], dtype=torch.float64, requires_grad=True)
    micro = MicroBatch(
        input_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        offsets=torch.tensor([0, 1]),
        columns={
            "loss_mask": ones,
            "loss_weights": ones.double(),
            "rollout_logprobs": torch.tensor([math.log(0.2)], dtype=torch.float64),
            "advantages": torch.tensor([2.0], dtype=torch.float64),
        },
    )
    expected = {  # ratio 1.5, advantage 2
        "cross_entropy": (-math.log(0.3), -1.0),
        "importance_sampling": (-3.0, -3.0),
        "ppo": (-2.4, 0.0),
        "cispo": (-2.4 * math.log(0.3), -2.4),
        "dro": (-2.0 * math.log(0.3) + 0.025 * math.log(1.5) ** 2, -2.0 + 0.05 * math.log(1.5)),
        "gspo": (-2.0008, 0.0),
    }
    assert expected.keys() == set(TINKER_LOSSES.names())
    for name, (value, gradient) in expected.items():
        loss, _ = tinker_objective(name)(target, None, micro)
        assert float(loss) == pytest.approx(value, rel=1e-9), name
        assert torch.autograd.grad(loss, target)[0].item() == pytest.approx(gradient, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("stable_reinforce", {}, "the formula of loss 'stable_reinforce' is not published"),
        ("grpo", {}, "unknown Tinker loss 'grpo'"),
        ("ppo", {"clip_low": 0.8}, "unknown option of Tinker loss 'ppo': 'clip_low'"),
        ("ppo", {"clip_low_threshold": 0.0}, "clip_low_threshold of Tinker loss 'ppo' must be a number"),
        ("cispo", {"clip_high_threshold": 0.9}, "clip_high_threshold of Tinker loss 'cispo' must be a number"),
        ("dro", {"beta": "0.1"}, "beta of Tinker loss 'dro' must be a"),
        ("cross_entropy", {"beta": 0.1}, "unknown option of Tinker loss 'cross_entropy': 'beta'"),
    ],
)
def test_what_is_not_available_is_refused_by_name(name, config, message):
    with pytest.raises(SettingsError, match=message):
        tinker_objective(name, config)
