"""Every option of every objective refuses invalid values."""

import math
from functools import partial
from typing import Annotated, Literal, get_type_hints

import pytest
import torch
from annotated_types import Gt
from refusals import refusal

from rl_core.annotation_rules import rule_of
from rl_core.errors import SettingsError
from rl_core.record_fields import fit_options
from rl_distill.objectives import ADVANTAGES, POLICY_LOSSES, PolicyTokens, policy_loss_with_options
from rl_distill.objectives.covariance_policy_loss import select_band, selection_of
from rl_distill.objectives.registry import Registry, declared_options, function_with_options


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


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo_clip", {"clip_low": -0.1}, r"must be a number of at least 0 and below 1; found -0.1"),
        ("ppo_clip", {"clip_low": 1.0}, r"must be a number of at least 0 and below 1; found 1.0"),
        ("ppo_clip", {"clip_high": -0.1}, r"must be a number of at least 0; found -0.1"),
        ("ppo_clip", {"dual_clip": 1.0}, r"must be a number above 1; found 1.0"),
        ("gspo", {"clip_low": 1.5}, "clip_low of policy loss 'gspo'"),
        ("clip_cov", {"clip_low": 1.5}, "clip_low of policy loss 'clip_cov'"),
        ("clip_cov", {"seed": 0.5}, "seed of policy loss 'clip_cov' must be a whole number; found 0.5"),
        ("clip_cov", {"share": 1.5}, r"must be a number above 0 and at most 1"),
        ("kl_cov", {"share": 0}, r"must be a number above 0 and at most 1; found 0"),
        ("kl_cov", {"kl_to_old_coefficient": -1}, r"must be a finite number of at least 0"),
        ("sapo", {"tau_positive": 0.0}, r"must be a finite number above 0"),
        ("geo_mean", {"clip_low": -1.0}, r"must be a number of at least 0"),
        ("cispo", {"clip_low": 1.1}, r"must be a number of at least 0 and at most 1"),
        ("dppo_tv", {"clip_high": 1.1}, r"must be a number of at least 0 and at most 1"),
        ("dppo_kl", {"ratio_cap": 0.9}, r"must be a number of at least 1"),
    ],
)
def test_impossible_options_of_policy_losses_are_refused_when_bound(name, options, message):
    with pytest.raises(SettingsError, match=message):
        policy_loss_with_options(name, options)


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
