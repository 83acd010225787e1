"""On-policy distillation: the student learns the teachers' probabilities on tokens that it sampled itself.

Sources: on-policy distillation, Agarwal et al. 2023, arXiv:2306.13649, and Gu et al. 2023, arXiv:2306.08543; per-token
estimates as a reward, Lu and Thinking Machines Lab 2025, thinkingmachines.ai/blog/on-policy-distillation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from rl_core.data import Batch, Ragged
from rl_core.errors import SettingsError
from rl_core.record_fields import PositiveFloat, converts_arguments, settings_record
from rl_distill.learner import MetricSums, MicroBatch, metric_totals, metric_values
from rl_distill.objectives.batch_columns import SampledLogprobs
from rl_distill.objectives.correction import mismatch_sums
from rl_distill.objectives.divergences import ComparisonOptions, DivergenceKind, DivergenceOptions, clamped
from rl_distill.objectives.kl import KLEstimator, absolute, excess, k1, k2, straight_through
from rl_distill.objectives.logit_divergence import MEASURES
from rl_distill.objectives.micro_batches import LOSSES, MEASURED, WEIGHTED, TeacherComparison, masked, needed_column
from rl_distill.objectives.policy import PolicyObjective
from rl_distill.objectives.teacher_tokens import check_sampled_tokens

DistillationLoss = Literal["forward_kl", "reverse_kl", "js", "uld", "k1", "abs", "k2", "k3", "nll"]

WHO = "distillation"
"""Owner of the options in messages."""
NAME = "actor/distillation/"
"""Prefix of the metrics' names."""
OF_SAMPLED = ("loss", "student_mass", "teacher_mass", "tail_mass", "clamped_fraction")
"""Measures that need only one token's logprob."""


def k3(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return r - 1 - log r of each token with r = teacher / policy, without the bound of `kl.k3`."""
    return excess(teacher_logprobs - policy_logprobs)


ESTIMATORS: dict[str, KLEstimator] = {
    "k1": partial(straight_through, estimator=k1),
    "abs": partial(straight_through, estimator=absolute),
    "k2": k2,
    "k3": k3,
}
"""Estimators as losses. The plain gradients of k1 and abs do not minimize the KL (see `kl`), so they use k2's."""


@settings_record
class DistillationObjectiveOptions(ComparisonOptions):
    """Options of the distillation objective.

    Attributes:
        loss: A divergence of distributions ("forward_kl", "reverse_kl", "js" or "uld"); an estimate of KL(student ||
            teacher) from the sampled token ("k1", "abs", "k2" or "k3"); or "nll", the cross entropy of the tokens
            themselves, for texts that a teacher wrote.
        coefficient: Weight of the distillation term in the loss.
        teachers: Names of the teachers, indexed by the column `teacher_index`; each gets its own metrics.
    """

    loss: DistillationLoss = "forward_kl"
    coefficient: PositiveFloat = 1.0
    teachers: Sequence[str] = ()

    @property
    def divergence(self) -> DivergenceOptions:
        """Options of the divergence and its clamps."""
        shared = {option.name: getattr(self, option.name) for option in fields(ComparisonOptions)}
        return DivergenceOptions(kind=self.loss if self.is_divergence else "forward_kl", **shared)  # type: ignore[arg-type]

    @property
    def is_divergence(self) -> bool:
        """Whether the loss compares full or top-k distributions."""
        return self.loss in get_args(DivergenceKind)


@dataclass(frozen=True, slots=True)
class DistillationObjective:
    """An `Objective`: coefficient * distillation, plus the policy's objective if tasks have rewards.

    Columns: `loss_mask` and `loss_weights`; from teachers `teacher_logprobs`, `teacher_ids`, `teacher_index` and, for
    whole distributions, `teacher_hidden`. "nll" needs no teacher columns. A token that no teacher scored (index -1)
    adds 0.

    Metrics: `actor/distillation/loss` and the others are means over the tokens that a teacher scored; `loss_min` and
    `loss_max` are the loss's extremes. Each teacher also has its own, such as `actor/distillation/NAME/loss`.
    `actor/distillation/aligned_fraction` is the share of trained tokens that a teacher scored.

    Attributes:
        options: Options of the distillation term.
        policy: Objective of rewarded tasks; None for pure distillation.
    """

    options: DistillationObjectiveOptions
    policy: PolicyObjective | None = None

    @property
    def comparison(self) -> TeacherComparison | None:
        """The comparison that the learner makes on the logits; None if the loss needs only logprobs."""
        if not self.options.is_divergence:
            return None
        return TeacherComparison(options=self.options.divergence, is_alone=self.policy is None)

    def __call__(self, policy_logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        """Return the loss of the micro-batch and its metric sums.

        Raises:
            DataError: A needed column is missing.
            ShapeError: A tensor is not [T].
        """
        mask = needed_column(micro, "loss_mask", who=WHO)
        weights = masked(needed_column(micro, "loss_weights", who=WHO), mask, name="loss_weights")
        if self.options.loss == "nll":
            index = torch.where(mask, 0, -1)
            losses = torch.where(mask, -policy_logprobs, 0.0)
            measured = {"loss": losses}
        else:
            index = needed_column(micro, "teacher_index", who=WHO)
            measured = self._divergence(micro) if self.options.is_divergence else self._estimate(policy_logprobs, micro)
            losses = measured["loss"]
        weighted = micro.columns.get(WEIGHTED)
        loss = self.options.coefficient * ((weights * losses) if weighted is None else weighted).sum()
        metrics = distillation_sums(measured, index, mask, teachers=self.options.teachers)
        if self.policy is None:
            return loss, metrics | _policy_sums(policy_logprobs, entropy, weights, micro)
        policy_loss, policy_metrics = self.policy(policy_logprobs, entropy, micro)
        return policy_loss + loss, {**policy_metrics, **metrics}

    def _divergence(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Return [T] measures that the learner computed from the logits."""
        needed_column(micro, LOSSES, who=f"{WHO} by {self.options.loss}")
        measured = {name: micro.columns[MEASURED + name] for name in MEASURES}
        measured["loss"] = measured.pop("losses")
        if self.options.loss == "uld":  # the vocabularies differ
            return {name: measured[name] for name in OF_SAMPLED}
        return measured

    def _estimate(self, policy_logprobs: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
        """Return [T] measures from the logprobs of the sampled tokens."""
        teacher = needed_column(micro, "teacher_logprobs", who=WHO)
        is_scored = needed_column(micro, "teacher_index", who=WHO) >= 0
        if "teacher_ids" in micro.columns:
            check_sampled_tokens(micro.columns["teacher_ids"][:, 0], micro.input_ids, is_scored)
        return estimate(policy_logprobs, teacher, is_scored, options=self.options)


def estimate(
    policy_logprobs: Tensor, teacher_logprobs: Tensor, is_scored: Tensor, *, options: DistillationObjectiveOptions
) -> dict[str, Tensor]:
    """Estimate KL(student || teacher) at each token; return it as "loss", with further measures.

    Args:
        policy_logprobs: [T] student logprobs of the tokens; the loss is differentiable with respect to them.
        teacher_logprobs: [T] teacher logprobs, or [T, K + 1] with the sampled token's first.
        is_scored: [T] bool, True where a teacher scored the token.
        options: Selects the estimator and its clamps.

    Raises:
        SettingsError: The loss is not an estimator.
    """
    if options.loss not in ESTIMATORS:
        raise SettingsError(
            f"loss must be one of {', '.join(ESTIMATORS)}, which need only the sampled token; found {options.loss!r}."
        )
    teacher = teacher_logprobs if teacher_logprobs.ndim == 1 else teacher_logprobs[:, 0]
    teacher = masked(teacher, is_scored, name="teacher_logprobs")
    student = masked(policy_logprobs, is_scored, name="policy_logprobs")
    student_mass, teacher_mass = (torch.where(is_scored, of.detach().exp(), 0.0) for of in (student, teacher))
    is_bitten = torch.zeros_like(is_scored)
    if options.min_logprob is not None:
        is_bitten = (student.detach() < options.min_logprob) | (teacher < options.min_logprob)
        student, teacher = student.clamp_min(options.min_logprob), teacher.clamp_min(options.min_logprob)
    losses, is_clamped = clamped(ESTIMATORS[options.loss](student, teacher), is_bitten, options.divergence)
    return {
        "loss": torch.where(is_scored, losses, 0.0),
        "student_mass": student_mass,
        "teacher_mass": teacher_mass,
        "tail_mass": torch.where(is_scored, 1.0 - teacher_mass, 0.0),
        "clamped_fraction": (is_clamped & is_scored).to(student_mass.dtype),
    }


def distillation_sums(
    measured: Mapping[str, Tensor], index: Tensor, mask: Tensor, *, teachers: Sequence[str] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (sum over tokens, number of tokens) of each metric, in total and per teacher, and the loss's extremes.

    Args:
        measured: [T] values by name, 0 where no teacher scored; must include "loss", whose absolute value is added as
            "abs_loss".
        index: [T] index of the teacher that scored the token; -1 for none.
        mask: [T] bool, True at trained tokens.
        teachers: Names of the teachers, by index.
    """
    is_scored = (index >= 0) & mask
    measured = {**measured, "abs_loss": measured["loss"].abs()}
    sums = {NAME + "aligned_fraction": (is_scored.sum(), mask.sum())}
    of_each = {NAME: is_scored} | {f"{NAME}{name}/": is_scored & (index == i) for i, name in enumerate(teachers)}
    for prefix, chosen in of_each.items():
        for name, values in measured.items():
            sums[prefix + name] = (torch.where(chosen, values.detach(), 0.0).sum(), chosen.sum())
        losses = measured["loss"].detach()
        sums[prefix + "loss_min"] = (torch.where(chosen, losses, math.inf).amin(), chosen.sum())
        sums[prefix + "loss_max"] = (torch.where(chosen, losses, -math.inf).amax(), chosen.sum())
    return sums


@converts_arguments
def with_distillation_advantages(
    batch: Batch,
    *,
    options: DistillationObjectiveOptions,
    policy_logprobs: SampledLogprobs = "rollout_logprobs",
    keep_advantages: bool = False,
) -> tuple[Batch, dict[str, float]]:
    """Use teachers as a reward: set each token's advantage to -coefficient times its KL estimate.

    Args:
        batch: The global batch with the teachers' columns and the sampling policy's logprobs.
        options: Selects the estimator, its clamps and coefficient.
        policy_logprobs: Column with the sampling policy's logprobs.
        keep_advantages: Add to the batch's advantages instead of replacing them.

    Returns:
        The batch with the column `advantages`, and its metrics.

    Raises:
        SettingsError: The loss is not an estimator on the sampled token.
        DataError: A column is missing.
    """
    index, mask = batch.tensor("teacher_index"), batch.tensor("loss_mask")
    is_scored = (index >= 0) & mask
    measured = estimate(batch.tensor(policy_logprobs), batch.tensor("teacher_logprobs"), is_scored, options=options)
    rewards = -options.coefficient * measured["loss"]
    advantages = (batch.tensor("advantages") + rewards) if keep_advantages else rewards
    metrics = metric_values([metric_totals([distillation_sums(measured, index, mask, teachers=options.teachers)])])
    column = Ragged(advantages.to(torch.float32).numpy(), batch.ragged("loss_mask").offsets)
    return batch.with_columns({"advantages": column}), metrics


def _policy_sums(
    policy_logprobs: Tensor, entropy: Tensor | None, weights: Tensor, micro: MicroBatch
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the entropy and mismatch metrics that `PolicyObjective` reports otherwise."""
    mask = micro.columns["loss_mask"]
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    if entropy is not None:
        sums["actor/entropy"] = ((weights * entropy.detach()).sum(), weights.sum())
    if "rollout_logprobs" in micro.columns:
        learned = micro.columns.get("old_logprobs", policy_logprobs).detach()
        sums |= mismatch_sums(learned, micro.columns["rollout_logprobs"], mask, micro.offsets)
    return sums
