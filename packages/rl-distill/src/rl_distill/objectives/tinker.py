"""The losses of the Tinker API as objectives that are summed over tokens.

Source: https://tinker-docs.thinkingmachines.ai/tinker/losses. Ratios beyond `LOG_RATIO_BOUND` have no gradient here.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from torch import Tensor

from rl_core.errors import SettingsError
from rl_core.record_fields import NonNegativeFloat
from rl_core.registry import Registry
from rl_distill.learner import MetricSums, MicroBatch, Objective
from rl_distill.objectives.kl import k3
from rl_distill.objectives.policy import (
    PolicyObjective,
    PolicyObjectiveOptions,
    policy_objective,
    supervised_objective,
)
from rl_distill.objectives.policy_loss import PolicyTokens, TokenLosses
from rl_distill.objectives.registry import function_with_options

LowThreshold = Annotated[float, Gt(0), Le(1)]
"""Lower bound of ratios."""

LowWeight = Annotated[float, Ge(0), Le(1)]
"""Lower bound of weights; 0 disables it."""

HighThreshold = Annotated[float, Ge(1)]
"""Upper bound of ratios or weights."""

NOT_PUBLISHED = ("stable_reinforce",)


TinkerLoss = Callable[..., Objective]
"""A loss of the API: (its configuration as keyword options) -> objective."""


def tinker_objective(loss: str, config: Mapping[str, Any] | None = None) -> Objective:
    """Return a loss of the API as an objective.

    The API's loss is a sum over a datum's target tokens, so `loss_mask` is True at all of them. The other columns are:

    - cross_entropy: `loss_weights`, the datum's weights; or, with `loss_weights` of 1, `target_ids` and
      `target_weights`, which may be several for each token.
    - Others: `loss_weights` of the aggregation "token-sum", `rollout_logprobs` (the datum's logprobs), `advantages`.
    - gspo: also `token_selection`, the datum's sequence_ratio_mask.

    Args:
        loss: Name in `TINKER_LOSSES`.
        config: Options by the API's names, such as clip_low_threshold.

    Raises:
        SettingsError: The loss or an option is unknown, an option's value is invalid, or the loss's formula is not
            published.
    """
    if loss in NOT_PUBLISHED:
        raise SettingsError(
            f"the formula of loss {loss!r} is not published, so it is not available. Choose one of "
            f"{', '.join(TINKER_LOSSES.names())}."
        )
    return function_with_options(TINKER_LOSSES, loss, config or {})()


def _cross_entropy() -> Objective:
    return soft_cross_entropy


def soft_cross_entropy(
    policy_logprobs: Tensor, entropy: Tensor | None, micro_batch: MicroBatch
) -> tuple[Tensor, MetricSums]:
    """Return the `supervised_objective`, in which `target_weights` sum the logprobs of each token's `target_ids`."""
    if "target_weights" in micro_batch.columns:
        policy_logprobs = (micro_batch.columns["target_weights"] * policy_logprobs).sum(-1)
    return supervised_objective(policy_logprobs, entropy, micro_batch)


def _importance_sampling() -> Objective:
    options = PolicyObjectiveOptions(old_logprobs="rollout_logprobs")
    return PolicyObjective(options=options, policy_loss=unclipped_ratio, kl=k3)


def unclipped_ratio(tokens: PolicyTokens) -> TokenLosses:
    """REINFORCE with importance weights: the ratio times the advantage, without a clip."""
    log_ratio = tokens.log_ratio()
    losses = -tokens.advantages * log_ratio.exp()
    return TokenLosses(losses=losses, diagnostics={"actor/ppo_kl": -log_ratio.detach()})


def _ppo(*, clip_low_threshold: LowThreshold = 0.8, clip_high_threshold: HighThreshold = 1.2) -> Objective:
    return _clipped("ppo_clip", clip_low_threshold, clip_high_threshold, dual_clip=float("inf"))


def _cispo(*, clip_low_threshold: LowWeight = 0.8, clip_high_threshold: HighThreshold = 1.2) -> Objective:
    return _clipped("cispo", clip_low_threshold, clip_high_threshold)


def _gspo(*, clip_low_threshold: LowThreshold = 1 - 3e-4, clip_high_threshold: HighThreshold = 1 + 4e-4) -> Objective:
    return _clipped("gspo", clip_low_threshold, clip_high_threshold)


def _dro(*, beta: NonNegativeFloat = 0.05) -> Objective:
    return _from_samples("dro", beta=beta)


def _clipped(policy_loss: str, low: float, high: float, **options: float) -> Objective:
    return _from_samples(policy_loss, clip_low=1.0 - low, clip_high=high - 1.0, **options)


def _from_samples(policy_loss: str, **options: float) -> Objective:
    """Return a policy loss relative to the logprobs that the tokens were sampled with."""
    return policy_objective(
        PolicyObjectiveOptions(old_logprobs="rollout_logprobs", policy_loss=policy_loss, policy_loss_options=options)
    )


TINKER_LOSSES: Registry[TinkerLoss] = Registry(
    "Tinker loss",
    {
        "cross_entropy": _cross_entropy,
        "importance_sampling": _importance_sampling,
        "ppo": _ppo,
        "cispo": _cispo,
        "dro": _dro,
        "gspo": _gspo,
    },
)
