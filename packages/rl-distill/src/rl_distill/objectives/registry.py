"""Registries of advantages and policy losses; other packages can add to them through entry points.

The registries of aggregations, KL estimators, session rules and rejection criteria are in their own modules. A function
is tried on a tiny batch, so that invalid options fail before a run starts.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch

from rl_core.errors import SettingsError
from rl_core.record_fields import fit_options
from rl_core.registry import Registry, unknown_name
from rl_distill.objectives.advantages import dr_grpo, gpg, grpo, grpo_passk, lite_ppo, maxrl, opo, rloo
from rl_distill.objectives.batch_advantages import (
    COMPONENT,
    gae,
    gdpo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from rl_distill.objectives.covariance_policy_loss import TokenSelection, clip_cov, kl_cov, selection_of
from rl_distill.objectives.policy_loss import PolicyLoss, PolicyTokens, ppo_clip
from rl_distill.objectives.policy_losses import cispo, dppo_kl, dppo_tv, dro, geo_mean, gspo, sapo
from rl_distill.objectives.policy_losses import gpg as gpg_loss
from rl_distill.objectives.rewarded_rows import AdvantageEstimator, RewardedRows

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

ADVANTAGES: Registry[AdvantageEstimator] = Registry(
    "advantage",
    {
        "gae": gae,
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "reinforce_plus_plus": reinforce_plus_plus,
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
        "remax": remax,
        "opo": opo,
        "gpg": gpg,
        "grpo_passk": grpo_passk,
        "gdpo": gdpo,
        "lite_ppo": lite_ppo,
        "maxrl": maxrl,
        "optimal_token_baseline": optimal_token_baseline,
    },
    group="rl_distill.advantages",
)
POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss",
    {
        "ppo_clip": ppo_clip,
        "gspo": gspo,
        "sapo": sapo,
        "gpg": gpg_loss,
        "geo_mean": geo_mean,
        "cispo": cispo,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
        "dppo_tv": dppo_tv,
        "dppo_kl": dppo_kl,
        "dro": dro,
    },
    group="rl_distill.policy_losses",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPolicyLoss:
    """A policy loss with its options bound.

    Attributes:
        loss: (PolicyTokens) -> TokenLosses.
        select: (old_logprobs, advantages, loss_mask) -> [T] bool over the global batch; None if the loss treats all
            tokens alike.
    """

    loss: PolicyLoss
    select: TokenSelection | None


def policy_loss_with_options(name: str, options: Mapping[str, Any]) -> BoundPolicyLoss:
    """Look up a policy loss and its token selection, and bind each one's options.

    Raises:
        SettingsError: The loss or an option is unknown, or an option's value is invalid.
    """
    loss, owner = POLICY_LOSSES.get(name), f"policy loss {name!r}"
    select = selection_of(loss)
    if select is None:
        return BoundPolicyLoss(loss=_bind(loss, options, owner=owner), select=None)
    of_loss, of_selection = declared_options(loss), declared_options(select)
    theirs = {option: value for option, value in options.items() if option in of_selection}
    mine = {option: value for option, value in options.items() if option in of_loss or option not in of_selection}
    return BoundPolicyLoss(
        loss=_bind(loss, mine, owner=owner, also_known=of_selection), select=_bind(select, theirs, owner=owner)
    )


def function_with_options(registry: Registry[FunctionT], name: str, options: Mapping[str, Any]) -> FunctionT:
    """Look up a function by name, and bind its keyword options.

    Raises:
        SettingsError: The function or an option is unknown, or an option's value is invalid.
    """
    return _bind(registry.get(name), options, owner=f"{registry.kind} {name!r}")


def _bind(function: FunctionT, options: Mapping[str, Any], *, owner: str, also_known: Iterable[str] = ()) -> FunctionT:
    declared = declared_options(function)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())
    for option in options:
        if option not in declared and not takes_any:
            raise SettingsError(unknown_name(f"option of {owner}:", option, {*declared, *also_known}))
    for option in [name for name, one in declared.items() if one.default is one.empty and name not in options]:
        raise SettingsError(f"{owner} needs the option {option!r}; found {', '.join(sorted(options)) or 'none'}.")
    return cast(FunctionT, partial(function, **fit_options(function, options, owner=owner))) if options else function


def declared_options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of a function by name."""
    parameters = inspect.signature(function).parameters
    return {name: one for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def try_advantage(name: str, options: Mapping[str, Any]) -> None:
    """Run an estimator on two one-token trajectories that have every column the built-in estimators read.

    Raises:
        SettingsError: The estimator or an option is unknown, or an option's value is invalid.
    """
    estimator = function_with_options(ADVANTAGES, name, options)
    weights = options.get("weights")
    zeros, index = torch.zeros(2), torch.arange(2)
    components = {COMPONENT + name: zeros for name in (weights if isinstance(weights, Mapping) else ("any",))}
    rows = RewardedRows(
        rewards=zeros,
        group=torch.zeros_like(index),
        session=index,
        output=torch.zeros_like(index),
        loss_mask=zeros == 0,
        offsets=torch.arange(3),
        columns=dict.fromkeys(("values", "old_logprobs", "sum_pi_squared"), zeros),
        row_columns={"reward_baseline": zeros, **components},
    )
    try:
        estimator(rows)
    except (TypeError, AttributeError) as error:  # e.g. a string for a number
        raise SettingsError(f"advantage {name!r} fails with the options {dict(options)}: {error}.") from error


def try_policy_loss(bound: BoundPolicyLoss) -> None:
    """Run a policy loss and its token selection on one token.

    Raises:
        SettingsError: An option's value is invalid.
    """
    zero = torch.zeros(1)
    try:
        bound.loss(
            PolicyTokens(
                policy_logprobs=zero,
                old_logprobs=zero,
                advantages=zero,
                loss_mask=zero == 0,
                offsets=torch.tensor([0, 1]),
                selection=None if bound.select is None else bound.select(zero, zero, zero == 0),
            )
        )
    except (TypeError, AttributeError) as error:  # e.g. a string for a number
        raise SettingsError(f"the policy loss fails with its options: {error}.") from error
