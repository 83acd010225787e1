"""Every option of every objective refuses invalid values."""

import math
from dataclasses import fields
from functools import partial
from typing import Annotated, Literal, get_type_hints

import pytest
import torch
from annotated_types import Gt
from refusals import refusal

from rl_core.annotation_rules import rule_of
from rl_core.errors import SettingsError
from rl_core.record_fields import fit_options
from rl_distill.objectives import (
    ADVANTAGES,
    POLICY_LOSSES,
    TINKER_LOSSES,
    AdaptiveKL,
    DistillationObjectiveOptions,
    PolicyObjectiveOptions,
    PolicyTokens,
    ValueObjective,
    policy_loss_with_options,
)
from rl_distill.objectives.batch_advantages import masked_whiten
from rl_distill.objectives.correction import importance_weights
from rl_distill.objectives.covariance_policy_loss import select_band, selection_of
from rl_distill.objectives.registry import Registry, declared_options, function_with_options, try_policy_loss
from rl_distill.objectives.value import value_losses


def float_options(registry):
    """Return (name, option) of every float option, including those of selections."""
    pairs = []
    for name in registry.names():
        function = registry.get(name)
        for part in (function, selection_of(function)):
            declared = {} if part is None else declared_options(part)
            pairs += [(name, option) for option, one in declared.items() if isinstance(one.default, float)]
    return pairs


def bound(registry, name, options):
    if registry is POLICY_LOSSES:
        return policy_loss_with_options(name, options)
    return function_with_options(registry, name, options)


@pytest.mark.parametrize("wrong", [math.nan, "0.5", None, True, [0.5], torch.tensor([0.5])])
@pytest.mark.parametrize(
    ("registry", "name", "option"),
    [(registry, *pair) for registry in (ADVANTAGES, POLICY_LOSSES) for pair in float_options(registry)],
)
def test_no_number_takes_nan_or_another_type(registry, name, option, wrong):
    with pytest.raises(SettingsError, match=f"{option} of {registry.kind} '{name}' must be a (finite )?number"):
        bound(registry, name, {option: wrong})


def test_every_built_in_option_has_a_rule():
    functions = [(name, registry.get(name)) for registry in (ADVANTAGES, POLICY_LOSSES) for name in registry.names()]
    assert len(functions) > 20
    for name, function in functions:
        for part in (function, selection_of(function) or function):
            declared = declared_options(part)
            hints = get_type_hints(part, include_extras=True)
            assert [option for option in declared if not rule_of(hints[option])] == []
            defaults = {option: one.default for option, one in declared.items()}
            assert fit_options(part, defaults, owner=name) == defaults


CLIP = {"clip_low": (0.2, [0, 0.99], [-0.01, 1.0]), "clip_high": (0.2, [0, math.inf], [-0.01])}
EPS = {"eps": (1e-6, [0, 0.5], [-1e-9, math.inf])}
UNIT = ([0, 1], [-0.01, 1.01])
SHARE = {"share": (2e-4, [1e-9, 1.0], [0, 1.01])}
CAP = {"ratio_cap": (20.0, [1, math.inf], [0.99])}
POSITIVE = ([0.01, 9.0], [0, math.inf])
DOCUMENTED = {
    (ADVANTAGES, "gae"): {"gamma": (1.0, *UNIT), "lam": (1.0, *UNIT), "whiten": (True, [False], [1])},
    (ADVANTAGES, "reinforce_plus_plus"): {"gamma": (1.0, *UNIT)},
    (ADVANTAGES, "grpo"): EPS,
    (ADVANTAGES, "lite_ppo"): EPS,
    (ADVANTAGES, "gpg"): {"divide_by_std": (False, [True], ["yes"]), **EPS},
    (ADVANTAGES, "grpo_passk"): {"divide_by_std": (True, [False], ["yes"]), **EPS},
    (ADVANTAGES, "gdpo"): {"weights": (None, [{"a": 1.0}], [{}]), **EPS},
    **{(ADVANTAGES, name): {} for name in ("dr_grpo", "rloo", "opo", "maxrl", "remax", "optimal_token_baseline")},
    (ADVANTAGES, "reinforce_plus_plus_baseline"): {},
    (POLICY_LOSSES, "ppo_clip"): {**CLIP, "dual_clip": (3.0, [1.01, math.inf], [1.0])},
    (POLICY_LOSSES, "gspo"): {"clip_low": (3e-4, *CLIP["clip_low"][1:]), "clip_high": (4e-4, *CLIP["clip_high"][1:])},
    (POLICY_LOSSES, "sapo"): {"tau_positive": (1.0, *POSITIVE), "tau_negative": (1.05, *POSITIVE)},
    (POLICY_LOSSES, "gpg"): {},
    (POLICY_LOSSES, "geo_mean"): {name: (0.4, [0, 2.0], [-0.01]) for name in CLIP},
    (POLICY_LOSSES, "cispo"): {"clip_low": (0.2, *UNIT), "clip_high": (0.28, *CLIP["clip_high"][1:])},
    (POLICY_LOSSES, "clip_cov"): {
        **CLIP,
        **SHARE,
        "low": (1.0, [-math.inf, 4.99], [math.nan, 5.0]),
        "high": (5.0, [1.01, math.inf], [math.nan, 1.0]),
        "seed": (0, [-1], [0.5]),
    },
    (POLICY_LOSSES, "kl_cov"): {**SHARE, "kl_to_old_coefficient": (1.0, [0], [-0.01, math.inf])},
    (POLICY_LOSSES, "dppo_tv"): {**dict.fromkeys(CLIP, (0.2, *UNIT)), **CAP},
    (POLICY_LOSSES, "dppo_kl"): {**{name: (0.05, [0, 2.0], [-0.01]) for name in CLIP}, **CAP},
    (POLICY_LOSSES, "dro"): {"beta": (0.05, [0], [-0.01, math.inf])},
    (TINKER_LOSSES, "cross_entropy"): {},
    (TINKER_LOSSES, "importance_sampling"): {},
    (TINKER_LOSSES, "dro"): {"beta": (0.05, [0], [-0.01])},
    **{
        (TINKER_LOSSES, name): {
            "clip_low_threshold": (low, lowest, [-0.01, *others, 1.01]),
            "clip_high_threshold": (high, [1, 9], [0.99]),
        }
        for name, low, high, lowest, others in (
            ("ppo", 0.8, 1.2, [0.01, 1], [0]),
            ("gspo", 1 - 3e-4, 1 + 4e-4, [0.01, 1], [0]),
            ("cispo", 0.8, 1.2, [0, 1], []),
        )
    },
}
"""Default, accepted and refused values of each option, from the papers and the documentation."""


@pytest.mark.parametrize(("registry", "name"), DOCUMENTED, ids=lambda one: getattr(one, "kind", one))
def test_defaults_and_limits_of_options_are_the_documented_ones(registry, name):
    function, documented = registry.get(name), DOCUMENTED[registry, name]
    found = {
        option: one.default
        for part in (function, selection_of(function))
        for option, one in (declared_options(part) if part else {}).items()
    }
    assert found == {option: default for option, (default, _, _) in documented.items()}
    for option, (_, accepted, refused) in documented.items():
        for value in accepted:
            tried(registry, name, {option: value})
        for value in refused:
            with pytest.raises(SettingsError, match=option):
                tried(registry, name, {option: value})


def tried(registry, name, options):
    """Bind the options, and run what they are of; some are checked together only then."""
    function = bound(registry, name, options)
    if registry is POLICY_LOSSES:
        try_policy_loss(function)


def test_every_built_in_option_is_documented():
    assert set(DOCUMENTED) == {(of, name) for of in (ADVANTAGES, POLICY_LOSSES, TINKER_LOSSES) for name in of.names()}


RECORDS = {
    PolicyObjectiveOptions: {
        "old_logprobs": ("old_logprobs", ["rollout_logprobs"], ["logprobs"]),
        "policy_loss": ("ppo_clip", ["gspo"], [1]),
        "clip_low": (None, [], []),
        "clip_high": (None, [], []),
        "dual_clip": (None, [], []),
        "policy_loss_options": ({}, [{"a": 1}], [1]),
        "kl_coefficient": (0.0, [0.5], [-0.01, math.inf]),
        "kl_estimator": ("k3", ["k1"], [1]),
        "entropy_coefficient": (0.0, [-1.0], [math.inf, -math.inf]),
        "correction": ("none", ["token", "sequence"], ["row"]),
        "correction_cap": (2.0, [0.01, math.inf], [0]),
    },
    DistillationObjectiveOptions: {
        "distribution": ("top_k", ["full"], ["top"]),
        "tail": ("bucket", ["drop", "renormalise"], ["none"]),
        "beta": (0.5, [0.01, 0.99], [0, 1]),
        "temperature": (1.0, [0.01], [0, math.inf]),
        "max_loss": (None, [0.01], [0, math.inf]),
        "min_logprob": (None, [-0.01, -99.0], [0, -math.inf]),
        "loss": ("forward_kl", ["k1", "nll"], ["kl"]),
        "coefficient": (1.0, [0.01], [0, math.inf]),
        "teachers": ((), [["a"]], [1]),
    },
    ValueObjective: {"clip": (0.2, [0.01, math.inf], [0])},
    AdaptiveKL: {
        "coefficient": (None, [0.01], [-0.01, math.inf]),
        "target": (None, [0.01], [0, math.inf]),
        "horizon": (10_000, [1], [0]),
    },
}


@pytest.mark.parametrize("record", RECORDS, ids=lambda one: one.__name__)
def test_defaults_and_limits_of_records_are_the_documented_ones(record):
    needed = {"coefficient": 0.1} if record is AdaptiveKL else {}
    default = record(**needed)
    assert {field.name for field in fields(record)} == set(RECORDS[record])
    for name, (value, accepted, refused) in RECORDS[record].items():
        assert name in needed or getattr(default, name) == value
        for one in accepted:
            kept = getattr(record(**{**needed, name: one}), name)
            assert list(kept) == one if isinstance(one, list) else kept == one
        for one in refused:
            with pytest.raises(SettingsError, match=name):
                record(**{**needed, name: one})


def test_limits_of_bounds_of_weights_and_values_are_the_documented_ones():
    zero, mask, offsets = torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])
    weigh = partial(importance_weights, zero, mask, offsets, level="token")
    for good in ({"cap": 0.01}, {"cap": math.inf}, {"floor": 0.01}, {"floor": 2.0}, {"cap": 0.5, "floor": 0.5}):
        weigh(**good)
    for wrong in ({"cap": 0.0}, {"floor": 0.0}, {"floor": 2.01}, {"floor": math.inf, "cap": math.inf}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            weigh(**wrong)
    for eps in (0, 1.0):
        masked_whiten(torch.ones(2), torch.ones(2, dtype=torch.bool), eps=eps)
    found = masked_whiten(torch.tensor([0.0, 2e-4]).double(), torch.ones(2, dtype=torch.bool))
    assert found.tolist() == pytest.approx([-1e-4 / (2e-8 + 1e-8) ** 0.5, 1e-4 / (2e-8 + 1e-8) ** 0.5])
    losses, was_clipped = value_losses(torch.ones(1), zero, zero - 1)
    assert (losses.tolist(), was_clipped.tolist()) == ([2.0], [0.0])
    assert value_losses(torch.ones(1), zero, zero + 1)[0].item() == pytest.approx(0.5 * 0.8**2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gae", {"gamma": 1.1}, r"gamma of advantage 'gae' must be a number of at least 0 and at most 1; found 1.1"),
        ("gae", {"whiten": 1}, "whiten of advantage 'gae' must be True or False; found 1"),
        ("grpo", {"eps": -1e-6}, "must be a finite number of at least 0"),
        ("grpo_passk", {"divide_by_std": "yes"}, "must be True or False; found 'yes'"),
        ("gdpo", {"weights": {}}, "must be a mapping, a string to a finite number, of length at least 1 or None"),
        ("gdpo", {"weights": {"style": math.nan}}, "must be a mapping, a string to a finite number"),
        ("gdpo", {"weights": {"style": "1"}}, "must be a mapping, a string to a finite number"),
    ],
)
def test_impossible_options_of_advantages_are_refused_when_bound(name, options, message):
    with pytest.raises(SettingsError, match=message):
        function_with_options(ADVANTAGES, name, options)


def test_what_is_unusual_but_possible_is_taken():
    for name, options in (
        ("ppo_clip", {"clip_low": 0, "clip_high": math.inf, "dual_clip": math.inf}),
        ("cispo", {"clip_low": 1.0}),
        ("geo_mean", {"clip_low": 2.0}),
        ("clip_cov", {"low": -5.0, "seed": -1}),
        ("sapo", {"tau_positive": 100}),
    ):
        assert refusal(policy_loss_with_options, name, options) is None
    weights = {"style": -1, "length": 0.5}
    assert refusal(function_with_options, ADVANTAGES, "gdpo", {"weights": weights}) is None


def test_the_options_of_others_are_checked_by_their_annotations():
    def mine(
        tokens,
        *,
        margin: Annotated[float, Gt(0)],
        size: int = 3,
        mode: Literal["a", "b"] = "a",
        share: float = 1,
        free=1,
    ):
        return tokens, margin, size, mode, share, free

    mine_alone = Registry("policy loss", {"mine": mine})
    good = {"margin": 0.5, "size": 4, "mode": "b", "free": object()}
    assert function_with_options(mine_alone, "mine", good).keywords == good
    for options, message in (
        ({"margin": 0.0}, r"margin of policy loss 'mine' must be a number above 0; found 0.0"),
        ({"margin": 1, "share": math.nan}, "share of policy loss 'mine' must be a number; found nan"),
        ({"margin": 1, "size": 2.5}, "size of policy loss 'mine' must be a whole number; found 2.5"),
        ({"margin": 1, "mode": "c"}, "mode of policy loss 'mine' must be one of 'a', 'b'; found 'c'"),
        ({"size": 2}, "policy loss 'mine' needs the option 'margin'; found size"),
        ({"margn": 2}, r"'margn'\. Did you mean 'margin'\? Known: free, margin, mode, share, size"),
    ):
        with pytest.raises(SettingsError, match=message):
            function_with_options(mine_alone, "mine", options)


def test_annotations_that_cannot_be_read_are_passed_over():
    def mine(tokens, *, margin: "NotImported" = 0.5):  # noqa: F821
        return margin

    assert function_with_options(Registry("policy loss", {"mine": mine}), "mine", {"margin": 2.0})(None) == 2.0


def test_objects_that_can_be_called_are_bound_too():
    class Mine:
        def __call__(self, tokens, *, margin: Annotated[float, Gt(0)] = 0.5):
            return margin

    losses = Registry("policy loss", {"mine": Mine(), "partial": partial(Mine.__call__, None)})
    for name in ("mine", "partial"):
        assert function_with_options(losses, name, {"margin": 2.0})(None) == 2.0
        with pytest.raises(SettingsError, match=f"margin of policy loss '{name}' must be a number above 0; found -1"):
            function_with_options(losses, name, {"margin": -1.0})


def test_a_band_has_a_width():
    zero = torch.zeros(1)
    with pytest.raises(SettingsError, match=r"low of select_band must be below high; found low = 5.0, high = 5.0"):
        select_band(zero, zero, zero == 0, low=5.0)


def test_a_direct_call_is_checked_too():
    zero = torch.zeros(1)
    tokens = PolicyTokens(
        policy_logprobs=zero, old_logprobs=zero, advantages=zero, loss_mask=zero == 0, offsets=torch.tensor([0, 1])
    )
    with pytest.raises(SettingsError, match="clip_low of ppo_clip"):
        POLICY_LOSSES.get("ppo_clip")(tokens, clip_low=math.nan)
