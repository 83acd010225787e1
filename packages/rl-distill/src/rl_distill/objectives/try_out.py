"""Test runs of estimators and policy losses on a tiny batch, so that invalid options fail before a run starts."""

from collections.abc import Mapping
from typing import Any

import torch

from rl_core.errors import SettingsError
from rl_distill.objectives.policy_loss import PolicyTokens
from rl_distill.objectives.registry import ADVANTAGES, BoundPolicyLoss, function_with_options
from rl_distill.objectives.rewarded_rows import RewardedRows
from rl_distill.objectives.whitened_advantages import COMPONENT


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
        columns={"values": zeros},
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
