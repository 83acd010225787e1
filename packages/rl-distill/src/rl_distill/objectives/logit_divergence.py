"""Divergence between a student's logits and its teachers' distributions at each token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rl_core.errors import DataError, ShapeError
from rl_core.record_fields import converts_arguments
from rl_distill.linear_map import sum_over_ranks
from rl_distill.objectives.divergences import (
    DivergenceOptions,
    TokenDivergence,
    clamped,
    divergence_terms,
    top_k_divergence,
)
from rl_distill.objectives.teacher_tokens import TeacherTokens, refuse_top_k_alone
from rl_distill.objectives.vocabulary import (
    VocabularyPart,
    all_logprobs,
    likeliest,
    take_top_k,
    top_k_logprobs,
)


class TokenComparison(NamedTuple):
    """Measures of M tokens, all 0 where no teacher scored. Only `losses` has a gradient.

    Attributes:
        losses: Divergence of each token.
        student_mass: The student's total probability of the teacher's top K tokens.
        teacher_mass: The teacher's total probability of its top K tokens.
        tail_mass: The teacher's probability outside its top K.
        overlap_ratio: Share of the teacher's top K tokens that are in the student's top K.
        agreement: 1 where student and teacher have the same most likely token.
        clamped_fraction: 1 where a clamp applied.
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
        """Concatenate the comparisons of consecutive tokens."""
        return TokenComparison(*map(torch.cat, zip(*parts, strict=True)))

    def detached(self) -> "TokenComparison":
        """Return the comparison without gradient."""
        return TokenComparison(*(value.detach() for value in self))


OVERLAP_OF_ALL = 64
"""Number of top tokens used for the overlap of full distributions; at most half the vocabulary."""

MEASURES = TokenComparison._fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitDivergence:
    """Divergence between a student's logits and its teachers.

    Attributes:
        options: Options of the divergence.
        part: Slice of the vocabulary that the logits cover.
        heads: The teachers' output matrices [V of the slice, H] by teacher index; needed only for full distributions.
    """

    options: DivergenceOptions
    part: VocabularyPart
    heads: Sequence[Tensor] = field(default=())

    @converts_arguments
    def __call__(self, logits: Tensor, teacher: TeacherTokens) -> TokenComparison:
        """Compare a student with its teachers.

        Args:
            logits: [M, V / ranks] the student's logits.
            teacher: The teachers' data for the same tokens.

        Raises:
            DataError: Needed top tokens or hidden states of the teachers are missing; or, on a CPU, a token is outside
                the vocabulary.
            ShapeError: The shapes do not match.
        """
        best = self._checked(logits, teacher)
        if self.options.distribution == "full":
            return self._compare_all(logits, teacher, best)
        ids = self._compared_ids(teacher, best)
        log_q, log_tail = top_k_logprobs(logits, ids, part=self.part, temperature=self.options.temperature)
        return _measured_on_top_k(self._on_top_k(log_q, log_tail, teacher), log_q, teacher, best)

    @converts_arguments
    def with_gradient(self, logits: Tensor, teacher: TeacherTokens, weights: Tensor) -> tuple[TokenComparison, Tensor]:
        """Compare, and compute the gradient of the sum of weights * losses, in the memory of the logits if possible.

        Args:
            logits: [M, V / ranks] float32 or float64; may be overwritten.
            teacher: The teachers' data for the same tokens.
            weights: [M] weights of the tokens.

        Returns:
            The comparison, and the gradient [M, V / ranks] with respect to the logits.

        Raises:
            DataError: See `__call__`.
            ShapeError: See `__call__`.
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
        logits[:, num_tokens:] = 0.0  # padding columns of the slice
        return comparison.detached(), logits

    def _checked(self, logits: Tensor, teacher: TeacherTokens) -> Tensor:
        """Check the inputs, and return the student's most likely tokens [M, K]."""
        if logits.ndim != 2 or len(logits) != len(teacher):
            raise ShapeError(
                f"logits must be [M, V] for the teacher's M = {len(teacher)} tokens; found {list(logits.shape)}. For "
                "padded rows, pass `logits[mask]`."
            )
        if self.options.kind != "uld" and logits.device.type == "cpu":  # on a GPU this would synchronize
            refuse_top_k_alone(teacher)
            if self.options.distribution == "top_k":
                _refuse_unknown_tokens(teacher, self.part.size)
        is_full = self.options.distribution == "full"
        k = min(OVERLAP_OF_ALL, max(1, self.part.size // 2)) if is_full else teacher.ids.shape[1] - 1
        if not k:
            raise DataError(
                f"{self.options.kind} needs the teacher's most likely tokens; the column teacher_ids has only the "
                "sampled token. Score with top_k >= 1."
            )
        return likeliest(logits, min(k, self.part.size), part=self.part)[1]

    def _compared_ids(self, teacher: TeacherTokens, best: Tensor) -> Tensor:
        """Return [M, K] tokens whose student logprobs are compared: the teacher's, or the student's own for "uld"."""
        return best if self.options.kind == "uld" else teacher.ids[:, 1:]

    def _on_top_k(self, log_q: Tensor, log_q_tail: Tensor, teacher: TeacherTokens) -> TokenDivergence:
        """Return the divergence on the top k."""
        return top_k_divergence(
            teacher.logprobs[:, 1:].to(log_q.dtype),
            log_q,
            log_q_tail,
            is_given=teacher.ids[:, 1:] >= 0,
            num_tokens=self.part.size,
            options=self.options,
        )

    def _compare_all(self, logits: Tensor, teacher: TeacherTokens, best: Tensor) -> TokenComparison:
        """Return the divergence on the whole vocabulary, with its measures."""
        teacher_logits = self._teacher_logits(teacher)
        log_p = all_logprobs(teacher_logits, part=self.part, temperature=self.options.temperature)
        log_q = all_logprobs(logits, part=self.part, temperature=self.options.temperature)
        losses = sum_over_ranks(divergence_terms(log_p, log_q, self.options).sum(-1), group=self.part.group)
        is_clamped = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        if self.options.min_logprob is not None:
            low = ((log_p < self.options.min_logprob) | (log_q.detach() < self.options.min_logprob)).any(-1)
            is_clamped = self.part.summed(low.float()) > 0
        ids = likeliest(teacher_logits, best.shape[1], part=self.part)[1]
        whole = torch.ones_like(losses.detach())
        divergence = clamped(losses, is_clamped, self.options)
        return _measured(divergence, (whole, whole), ids, best, is_scored=teacher.index >= 0)

    @torch.no_grad()
    def _teacher_logits(self, teacher: TeacherTokens) -> Tensor:
        """Compute the teachers' logits [M, V / ranks] from their hidden states; 0 where no teacher scored."""
        hidden = teacher.hidden
        if hidden is None or not self.heads:
            raise DataError(
                'distribution = "full" needs the teachers\' hidden states (the column teacher_hidden) and their '
                f"output matrices on the learner; found {'no' if hidden is None else 'the'} hidden states and "
                f"{len(self.heads)} matrices. Use Megatron teachers, and call the learner's load_teacher_heads."
            )
        if len(self.heads) == 1:  # selecting rows would synchronize a GPU
            head = self.heads[0]
            logits = (hidden[:, : head.shape[1]].to(head.dtype) @ head.T).to(hidden.dtype)
            return logits.masked_fill_((teacher.index != 0).unsqueeze(-1), 0.0)
        logits = hidden.new_zeros(len(hidden), self.heads[0].shape[0])
        for number, head in enumerate(self.heads):
            rows = (teacher.index == number).nonzero().squeeze(1)
            logits[rows] = (hidden[rows, : head.shape[1]].to(head.dtype) @ head.T).to(logits.dtype)
        return logits


def _refuse_unknown_tokens(teacher: TeacherTokens, num_tokens: int) -> None:
    is_wrong = (teacher.ids >= num_tokens).any(-1) & (teacher.index >= 0)
    if bool(is_wrong.any()):
        at = int(is_wrong.nonzero()[0])
        raise DataError(
            f"a teacher's ids must be below {num_tokens}, the student's vocabulary size; found "
            f"{int(teacher.ids[at].max())} at token {at} ({int(is_wrong.sum())} such tokens in total). For teachers "
            'with another vocabulary, use kind = "uld".'
        )


def _is_among(ids: Tensor, others: Tensor) -> Tensor:
    """Return [M, K] bool, True where an id occurs among the others of its row."""
    ordered = others.sort(-1).values
    places = torch.searchsorted(ordered, ids.contiguous()).clamp_max(ordered.shape[-1] - 1)
    return ordered.gather(-1, places) == ids


def _measured_on_top_k(
    divergence: TokenDivergence, log_q: Tensor, teacher: TeacherTokens, best: Tensor
) -> TokenComparison:
    """Return losses with their measures; see `_measured`. `log_q` [M, K] are the student's of the compared tokens."""
    ids, log_p = teacher.ids[:, 1:], teacher.logprobs[:, 1:].to(log_q.dtype)
    student, of_teacher = (torch.where(ids >= 0, of.exp(), 0.0).sum(-1) for of in (log_q.detach(), log_p))
    return _measured(divergence, (student, of_teacher), ids, best, is_scored=teacher.index >= 0)


def _measured(
    divergence: TokenDivergence, masses: tuple[Tensor, Tensor], ids: Tensor, best: Tensor, *, is_scored: Tensor
) -> TokenComparison:
    """Return the losses with their measures, 0 where no teacher scored.

    Args:
        divergence: The losses, and where they are clamped.
        masses: [M] probability of the compared tokens under student and teacher.
        ids: [M, K] the teacher's most likely tokens, -1 for none.
        best: [M, K] the student's most likely tokens.
        is_scored: [M] bool, True where a teacher scored.
    """
    is_given = ids >= 0
    (losses, is_clamped), (student_mass, teacher_mass) = divergence, masses
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
