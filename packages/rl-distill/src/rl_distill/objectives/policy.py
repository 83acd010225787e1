"""The policy's objectives: policy loss, KL to the reference and entropy; or supervised learning.

Source: Shao et al. 2024, arXiv:2402.03300, equation 3, with the parts in `policy_loss`, `kl` and `correction`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rl_core.errors import SettingsError
from rl_core.record_fields import FiniteFloat, NonNegativeFloat, converts_arguments, settings_record
from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.objectives.aggregation import Horizon, aggregate
from rl_distill.objectives.correction import WeightCap, importance_weights, mismatch_sums
from rl_distill.objectives.kl import KL_ESTIMATORS, KLEstimator
from rl_distill.objectives.micro_batches import masked, needed_column
from rl_distill.objectives.policy_loss import PolicyLoss, PolicyTokens, TokenLosses
from rl_distill.objectives.registry import BoundPolicyLoss, policy_loss_with_options, try_policy_loss

Term = tuple[float, Tensor]
"""(factor, [T] values) of a term in the loss."""

WHO = "the objective"
"""Owner of the columns in messages."""

CLIP_OPTIONS = ("clip_low", "clip_high", "dual_clip")


@settings_record
class PolicyObjectiveOptions:
    """Options of the policy's objective.

    Attributes:
        old_logprobs: Column for the ratio's denominator: "old_logprobs" (the learner's, before the update) or
            "rollout_logprobs" (the engine's).
        policy_loss: Name in `POLICY_LOSSES`.
        clip_low: Lower clip range; None uses the policy loss's default (ppo_clip: 0.2).
        clip_high: Upper clip range; None uses the policy loss's default (ppo_clip: 0.2).
        dual_clip: Bound of the loss at negative advantages; None uses the policy loss's default (ppo_clip: 3), inf
            disables it.
        policy_loss_options: Further options of the policy loss and of its token selection, by name.
        kl_coefficient: Weight of the KL to the reference in the loss; a nonzero weight needs `reference_logprobs`.
        kl_estimator: "k1", "abs", "k2" or "k3"; "k1+", "abs+" and "k3+" use the gradient of k2.
        entropy_coefficient: Weight of the entropy, which is subtracted from the loss.
        correction: Level of truncated importance sampling against the engine's mismatch: "none", "token" or "sequence".
            Needs `rollout_logprobs`.
        correction_cap: Maximum importance weight.
    """

    old_logprobs: Literal["old_logprobs", "rollout_logprobs"] = "old_logprobs"
    policy_loss: str = "ppo_clip"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    policy_loss_options: Mapping[str, Any] = field(default_factory=dict)
    kl_coefficient: NonNegativeFloat = 0.0
    kl_estimator: str = "k3"
    entropy_coefficient: FiniteFloat = 0.0
    correction: Literal["none", "token", "sequence"] = "none"
    correction_cap: WeightCap = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """An `Objective`; call it with policy_logprobs [T], entropy [T] or None, and the micro-batch.

    The loss of a token is correction weight * policy loss + kl_coefficient * KL - entropy_coefficient * entropy. The
    loss of the micro-batch is their sum weighted by `loss_weights`. Tokens outside `loss_mask` are ignored.

    Columns: `loss_mask`, `loss_weights` and `advantages` are required. Without `old_logprobs`, the current policy is
    used as the old one (ratio 1, gradient kept), which is exact for one update per batch and wrong for several. The KL
    needs `reference_logprobs`, the mismatch metrics `rollout_logprobs`, Clip-Cov and KL-Cov `token_selection`.
    `correction_weights`, if present, replace `options.correction`. The mismatch metrics compare the engine's logprobs
    with `old_logprobs` or, without these, with the current policy's.

    Metrics: `actor/pg_loss`, `actor/kl_loss` and `actor/entropy` are means weighted by `loss_weights`. The policy
    loss's diagnostics are means over trained tokens.

    Attributes:
        options: Options of the objective.
        policy_loss: The policy loss with its options bound.
        kl: The KL estimator.
    """

    options: PolicyObjectiveOptions
    policy_loss: PolicyLoss
    kl: KLEstimator

    def __call__(self, policy_logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        """Return the loss of the micro-batch and its metric sums.

        Raises:
            ShapeError: A tensor is not [T].
            DataError: A needed column is missing.
            SettingsError: A coefficient is nonzero, but the learner or the batch lacks the input of its term.
        """
        mask = needed_column(micro, "loss_mask", who=WHO)
        weights = masked(needed_column(micro, "loss_weights", who=WHO), mask, name="loss_weights")
        learned = micro.columns.get("old_logprobs", policy_logprobs.detach())
        is_rollout = self.options.old_logprobs == "rollout_logprobs"
        tokens = PolicyTokens(
            policy_logprobs=policy_logprobs,
            old_logprobs=needed_column(micro, "rollout_logprobs", who=WHO) if is_rollout else learned,
            advantages=needed_column(micro, "advantages", who=WHO),
            loss_mask=mask,
            offsets=micro.offsets,
            selection=micro.columns.get("token_selection"),
        )
        computed = self.policy_loss(tokens)
        losses = masked(computed.losses, mask, name="losses of the policy loss")
        correction = self._correction_weights(tokens, micro)
        terms = {"actor/pg_loss": (1.0, losses if correction is None else losses * correction)}
        terms |= self._kl_term(tokens, micro) | self._entropy_term(entropy, mask)
        totals = {name: (weights * values).sum() for name, (_, values) in terms.items()}
        # Leave out terms that are only metrics, so that not even 0 * inf reaches the loss.
        loss = torch.stack([factor * totals[name] for name, (factor, _) in terms.items() if factor]).sum()
        metrics = {name: (total.detach(), weights.sum()) for name, total in totals.items()}
        metrics |= _diagnostic_sums(computed, mask)
        if "rollout_logprobs" in micro.columns:
            metrics |= mismatch_sums(learned, micro.columns["rollout_logprobs"], mask, micro.offsets)
        return loss, metrics

    def _correction_weights(self, tokens: PolicyTokens, micro: MicroBatch) -> Tensor | None:
        """Return [T] importance weights; None without correction."""
        if "correction_weights" in micro.columns:
            return masked(micro.columns["correction_weights"], tokens.loss_mask, name="correction_weights")
        if self.options.correction == "none":
            return None
        log_ratio = tokens.old_logprobs - needed_column(micro, "rollout_logprobs", who=WHO)
        return importance_weights(
            log_ratio, tokens.loss_mask, tokens.offsets, level=self.options.correction, cap=self.options.correction_cap
        )

    def _kl_term(self, tokens: PolicyTokens, micro: MicroBatch) -> dict[str, Term]:
        """Return the KL term; nothing without a reference."""
        if "reference_logprobs" not in micro.columns:
            if self.options.kl_coefficient:
                raise SettingsError(
                    f"kl_coefficient is {self.options.kl_coefficient}, but the batch has no reference_logprobs. Score "
                    "the batch with the reference first, or set kl_coefficient = 0."
                )
            return {}
        reference = masked(micro.columns["reference_logprobs"], tokens.loss_mask, name="reference_logprobs")
        return {"actor/kl_loss": (self.options.kl_coefficient, self.kl(tokens.policy_logprobs, reference))}

    def _entropy_term(self, entropy: Tensor | None, mask: Tensor) -> dict[str, Term]:
        """Return the entropy term; nothing without entropies."""
        if entropy is None:
            if self.options.entropy_coefficient:
                raise SettingsError(
                    f"entropy_coefficient is {self.options.entropy_coefficient}, but the learner passed no entropy. "
                    "Call train_step with with_entropy=True, or set entropy_coefficient = 0."
                )
            return {}
        return {"actor/entropy": (-self.options.entropy_coefficient, masked(entropy, mask, name="entropy"))}


def policy_objective(options: PolicyObjectiveOptions) -> PolicyObjective:
    """Build the objective, and test its policy loss on one token.

    Raises:
        SettingsError: A name or option is unknown (the message suggests the closest one), or a value is invalid.
    """
    bound = bound_policy_loss(options)
    objective = PolicyObjective(options=options, policy_loss=bound.loss, kl=KL_ESTIMATORS.get(options.kl_estimator))
    try_policy_loss(bound)
    return objective


def bound_policy_loss(options: PolicyObjectiveOptions) -> BoundPolicyLoss:
    """Return the policy loss and its token selection, with their options bound.

    Raises:
        SettingsError: A name or option is unknown (the message suggests the closest one), or an option is set twice.
    """
    clips = {name: getattr(options, name) for name in CLIP_OPTIONS if getattr(options, name) is not None}
    twice = sorted(clips.keys() & options.policy_loss_options.keys())
    if twice:
        raise SettingsError(f"{twice[0]} is set both as an option and in policy_loss_options; remove one.")
    return policy_loss_with_options(options.policy_loss, {**clips, **options.policy_loss_options})


@converts_arguments
def compute_policy_loss(
    tokens: PolicyTokens,
    policy_loss: str = "ppo_clip",
    *,
    aggregation: str = "token-mean",
    horizon: Horizon = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy loss of a whole batch in your own training loop; call `backward` on the result.

    Args:
        tokens: The whole batch; each of several micro-batches would be averaged separately.
        policy_loss: Name in `POLICY_LOSSES`.
        aggregation: Name in `AGGREGATIONS`.
        horizon: Constant length by which seq-mean-token-sum-norm divides.
        options: Options of the policy loss and of its token selection.

    Returns:
        The loss and its diagnostics, each a mean over trained tokens.

    Raises:
        SettingsError: A name or option is unknown (the message suggests the closest one), or a value is invalid.
    """
    bound = policy_loss_with_options(policy_loss, options)
    if bound.select is not None and tokens.selection is None:
        selection = bound.select(tokens.old_logprobs, tokens.advantages, tokens.loss_mask)
        tokens = replace(tokens, selection=selection)
    computed = bound.loss(tokens)
    loss = aggregate(
        computed.losses, tokens.loss_mask, aggregation=aggregation, horizon=horizon, offsets=tokens.offsets
    )
    sums = _diagnostic_sums(computed, tokens.loss_mask)
    return loss, {name: total / count.clamp(min=1) for name, (total, count) in sums.items()}


def supervised_objective(
    policy_logprobs: Tensor,
    entropy: Tensor | None,  # noqa: ARG001 - every objective has this signature
    micro_batch: MicroBatch,
) -> tuple[Tensor, MetricSums]:
    """Return the cross entropy weighted by `loss_weights`.

    Args:
        policy_logprobs: [T] natural-log probabilities of the tokens.
        entropy: Unused.
        micro_batch: Needs the columns loss_weights [T] and loss_mask [T].

    Returns:
        The loss, and the metric sums of `nll` (mean over trained tokens, natural log).
    """
    mask = micro_batch.columns["loss_mask"]
    losses = torch.where(mask, -policy_logprobs, 0.0)
    loss = (losses * micro_batch.columns["loss_weights"]).sum()
    return loss, {"nll": (losses.detach().sum(), mask.sum())}


def _diagnostic_sums(computed: TokenLosses, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (sum over trained tokens, number of trained tokens) of each diagnostic."""
    count = mask.sum()
    return {
        name: (masked(values.detach(), mask, name=name).sum(), count.to(values.dtype))
        for name, values in computed.diagnostics.items()
    }
