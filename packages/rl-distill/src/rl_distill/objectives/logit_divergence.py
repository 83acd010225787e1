"""The divergence of a student's logits from what a teacher said, token by token, where the logits are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rl_core.errors import DataError, ShapeError
from rl_core.record_fields import converts_arguments
from rl_distill.objectives.divergences import (
    DivergenceOptions,
    TokenDivergence,
    clamped,
    divergence_terms,
    top_k_divergence,
)
from rl_distill.objectives.teacher_tokens import TeacherTokens, refuse_top_k_alone
from rl_distill.objectives.vocabulary_parts import (
    VocabularyPart,
    all_logprobs,
    likeliest,
    sum_over_ranks,
    take_top_k,
    top_k_logprobs,
)


class TokenComparison(NamedTuple):
    """Student and teacher at each of M tokens; all but `losses` without gradient, and 0 where no teacher scored.

    Attributes:
        losses: The divergence.
        student_mass: The student's probability of the teacher's K likeliest tokens together.
        teacher_mass: The teacher's.
        tail_mass: What of the teacher's is outside.
        overlap_ratio: Share of the teacher's K likeliest tokens that are among the student's K likeliest.
        agreement: 1 where both find the same token likeliest.
        clamped_fraction: 1 where a clamp bit.
    """

    losses: Tensor
    student_mass: Tensor
    teacher_mass: Tensor
    tail_mass: Tensor
    overlap_ratio: Tensor
    agreement: Tensor
    clamped_fraction: Tensor

    @staticmethod
    def joined(parts: Iterable["TokenComparison"]) -> "TokenComparison":
        """Those of consecutive tokens as one."""
        return TokenComparison(*map(torch.cat, zip(*parts, strict=True)))

    def detached(self) -> "TokenComparison":
        """The same, without gradient."""
        return TokenComparison(*(value.detach() for value in self))


OVERLAP_OF_ALL = 64
"""Number of top tokens whose overlap is measured when whole distributions are compared; half of a small vocabulary."""

MEASURES = TokenComparison._fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitDivergence:
    """A divergence, ready to be taken of logits.

    Attributes:
        options: Which.
        part: The slice of the vocabulary that the logits are of.
        heads: The teachers' output matrices [V of the slice, H], by their index, for whole distributions.
    """

    options: DivergenceOptions
    part: VocabularyPart
    heads: Sequence[Tensor] = field(default=())

    @converts_arguments
    def __call__(self, logits: Tensor, teacher: TeacherTokens) -> TokenComparison:
        """Compare a student with its teachers.

        Args:
            logits: [M, V / ranks] of the student.
            teacher: Of the same tokens.

        Raises:
            DataError: The teachers gave no likeliest tokens, or no hidden states, and they are needed; or, on a CPU,
                tokens that the vocabulary has not.
            ShapeError: The shapes do not fit.
        """
        best = self._checked(logits, teacher)
        if self.options.distribution == "full":
            return self._compare_all(logits, teacher, best)
        ids = self._compared_ids(teacher, best)
        log_q, log_tail = top_k_logprobs(logits, ids, part=self.part, temperature=self.options.temperature)
        return _measured_on_top_k(self._on_top_k(log_q, log_tail, teacher), log_q, teacher, best)

    @converts_arguments
    def with_gradient(self, logits: Tensor, teacher: TeacherTokens, weights: Tensor) -> tuple[TokenComparison, Tensor]:
        """Compare, and differentiate the sum of weights * losses, in the logits' own place where that can be.

        Args:
            logits: [M, V / ranks] float32 or float64, that nobody else needs.
            teacher: Of the same tokens.
            weights: [M] of the tokens.

        Returns:
            The comparison, and the gradient [M, V / ranks].

        Raises:
            DataError: As in a call.
            ShapeError: As in a call.
        """
        if self.options.distribution == "full":
            logits.requires_grad_()
            with torch.enable_grad():
                comparison = self(logits, teacher)
                (grad,) = torch.autograd.grad((weights * comparison.losses).sum(), logits)
            return comparison.detached(), grad
        best = self._checked(logits, teacher)
        temperature = self.options.temperature
        taken = take_top_k(logits, self._compared_ids(teacher, best), part=self.part, temperature=temperature)
        log_q, log_tail = taken.logprobs.detach().requires_grad_(), taken.log_tail.detach().requires_grad_()
        with torch.enable_grad():
            comparison = _measured_on_top_k(self._on_top_k(log_q, log_tail, teacher), log_q, teacher, best)
            of_logprobs, of_tail = torch.autograd.grad(
                (weights * comparison.losses).sum(), (log_q, log_tail), allow_unused=True
            )
        of_both = (
            torch.zeros_like(values) if grad is None else grad / temperature
            for values, grad in ((log_q, of_logprobs), (log_tail, of_tail))
        )
        num_tokens = taken.gradient(*of_both, in_place=True).shape[-1]
        logits[:, num_tokens:] = 0.0  # what pads the slice
        return comparison.detached(), logits

    def _checked(self, logits: Tensor, teacher: TeacherTokens) -> Tensor:
        """[M, K] the student's likeliest tokens."""
        if logits.ndim != 2 or len(logits) != len(teacher):
            raise ShapeError(
                f"logits must be [M, V] of the teacher's M = {len(teacher)} tokens; found {list(logits.shape)}. "
                "Of padded rows give those of the mask, `logits[mask]`."
            )
        if self.options.kind != "uld" and logits.device.type == "cpu":  # on a GPU it would stop the device
            refuse_top_k_alone(teacher)
            if self.options.distribution == "top_k":
                _refuse_unknown_tokens(teacher, self.part.size)
        is_full = self.options.distribution == "full"
        k = min(OVERLAP_OF_ALL, max(1, self.part.size // 2)) if is_full else teacher.ids.shape[1] - 1
        if not k:
            raise DataError(
                f"{self.options.kind} needs the teacher's likeliest tokens; the column teacher_ids has the sampled "
                "token alone. Score with top_k of at least 1."
            )
        return likeliest(logits, min(k, self.part.size), part=self.part)[1]

    def _compared_ids(self, teacher: TeacherTokens, best: Tensor) -> Tensor:
        """[M, K] the tokens whose student's logprobs are compared: the teacher's, or of two vocabularies its own."""
        return best if self.options.kind == "uld" else teacher.ids[:, 1:]

    def _on_top_k(self, log_q: Tensor, log_q_tail: Tensor, teacher: TeacherTokens) -> TokenDivergence:
        """The divergence on the top k."""
        return top_k_divergence(
            teacher.logprobs[:, 1:].to(log_q.dtype),
            log_q,
            log_q_tail,
            is_given=teacher.ids[:, 1:] >= 0,
            num_tokens=self.part.size,
            options=self.options,
        )

    def _compare_all(self, logits: Tensor, teacher: TeacherTokens, best: Tensor) -> TokenComparison:
        """The divergence on the whole vocabulary, with its measures."""
        teacher_logits = self._teacher_logits(teacher)
        log_p = all_logprobs(teacher_logits, part=self.part, temperature=self.options.temperature)
        log_q = all_logprobs(logits, part=self.part, temperature=self.options.temperature)
        losses = sum_over_ranks(divergence_terms(log_p, log_q, self.options).sum(-1), group=self.part.group)
        is_bitten = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        if self.options.min_logprob is not None:
            low = ((log_p < self.options.min_logprob) | (log_q.detach() < self.options.min_logprob)).any(-1)
            is_bitten = self.part.summed(low.float()) > 0
        ids = likeliest(teacher_logits, best.shape[1], part=self.part)[1]
        whole = torch.ones_like(losses.detach())
        found = clamped(losses, is_bitten, self.options)
        return _measured(found, (whole, whole), ids, best, is_scored=teacher.index >= 0)

    @torch.no_grad()
    def _teacher_logits(self, teacher: TeacherTokens) -> Tensor:
        """[M, V / ranks] from the hidden states; 0 where no teacher scored."""
        hidden = teacher.hidden
        if hidden is None or not self.heads:
            raise DataError(
                'distribution = "full" needs the teachers\' hidden states (the column teacher_hidden) and their output '
                f"matrices on the learner; found {'no' if hidden is None else 'the'} hidden states and "
                f"{len(self.heads)} matrices. Call load_teacher_heads of the learner, with Megatron teachers."
            )
        if len(self.heads) == 1:  # rows are not selected, for which a GPU would be waited for
            head = self.heads[0]
            logits = (hidden[:, : head.shape[1]].to(head.dtype) @ head.T).to(hidden.dtype)
            return logits.masked_fill_((teacher.index != 0).unsqueeze(-1), 0.0)
        logits = hidden.new_zeros(len(hidden), self.heads[0].shape[0])
        for number, head in enumerate(self.heads):
            rows = (teacher.index == number).nonzero().squeeze(1)
            if len(rows):
                logits[rows] = (hidden[rows, : head.shape[1]].to(head.dtype) @ head.T).to(logits.dtype)
        return logits


def _refuse_unknown_tokens(teacher: TeacherTokens, num_tokens: int) -> None:
    is_wrong = (teacher.ids >= num_tokens).any(-1) & (teacher.index >= 0)
    if bool(is_wrong.any()):
        at = int(is_wrong.nonzero()[0])
        raise DataError(
            f"a teacher's ids must be below {num_tokens}, the student's vocabulary; found {int(teacher.ids[at].max())} "
            f'at token {at}, and {int(is_wrong.sum())} such tokens. For another vocabulary there is kind = "uld".'
        )


def _is_among(ids: Tensor, others: Tensor) -> Tensor:
    """[M, K] bool, where an id is among the others of its row."""
    if not ids.shape[-1] or not others.shape[-1]:
        return torch.zeros_like(ids, dtype=torch.bool)
    ordered = others.sort(-1).values
    places = torch.searchsorted(ordered, ids.contiguous()).clamp_max(ordered.shape[-1] - 1)
    return ordered.gather(-1, places) == ids


@torch.no_grad()
def _masses(log_q: Tensor, teacher: TeacherTokens) -> tuple[Tensor, Tensor]:
    """[M] the student's and the teacher's probability of the top k."""
    is_given = teacher.ids[:, 1:] >= 0
    of_both = (log_q, teacher.logprobs[:, 1:].to(log_q.dtype))
    student, teachers = (torch.where(is_given, of.exp(), 0.0).sum(-1) for of in of_both)
    return student, teachers


def _measured_on_top_k(found: TokenDivergence, log_q: Tensor, teacher: TeacherTokens, best: Tensor) -> TokenComparison:
    """The losses with their measures.

    Args:
        found: The losses.
        log_q: [M, K] the student's logprobs of what was compared.
        teacher: Of the same tokens.
        best: [M, K] the student's likeliest tokens.
    """
    return _measured(found, _masses(log_q.detach(), teacher), teacher.ids[:, 1:], best, is_scored=teacher.index >= 0)


def _measured(
    found: TokenDivergence, masses: tuple[Tensor, Tensor], ids: Tensor, best: Tensor, *, is_scored: Tensor
) -> TokenComparison:
    """The losses with their measures, 0 where no teacher scored.

    Args:
        found: The losses.
        masses: [M] the student's and the teacher's probability of what was compared.
        ids: [M, K] the teacher's likeliest tokens, -1 for none.
        best: [M, K] the student's.
        is_scored: [M] bool.
    """
    is_given = ids >= 0
    losses, is_clamped = found
    student_mass, teacher_mass = masses
    measured = {
        "student_mass": student_mass,
        "teacher_mass": teacher_mass,
        "tail_mass": (1.0 - teacher_mass).clamp_min(0.0),
        "overlap_ratio": (_is_among(ids, best) & is_given).sum(-1) / is_given.sum(-1).clamp_min(1),
        "agreement": (ids[:, :1] == best[:, :1]).any(-1),
        "clamped_fraction": is_clamped,
    }
    rest = {name: torch.where(is_scored, value.to(teacher_mass.dtype), 0.0) for name, value in measured.items()}
    return TokenComparison(losses=torch.where(is_scored, losses, 0.0), **rest)
