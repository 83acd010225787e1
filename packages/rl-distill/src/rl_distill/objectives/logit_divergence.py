"""The divergence of a student's logits from what a teacher said, token by token, where the logits are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from rl_core.errors import DataError, ShapeError
from rl_distill.learner import MicroBatch
from rl_distill.objectives.divergences import (
    DivergenceOptions,
    TokenDivergence,
    clamped,
    divergence_terms,
    top_k_divergence,
)
from rl_distill.objectives.micro_columns import needed_column
from rl_distill.objectives.vocabulary_parts import (
    VocabularyPart,
    all_logprobs,
    chosen_of,
    likeliest,
    sum_of_parts,
    top_k_logprobs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTokens:
    """What teachers said of M tokens.

    Attributes:
        logprobs: [M, K + 1], of the token itself and of the teacher's K likeliest, falling.
        ids: [M, K + 1] int64 tokens of these; -1 for none.
        index: [M] int64, which teacher; -1 where none scored the token, which then counts for nothing.
        hidden: [M, H] the teacher's hidden states, for its whole distribution; None without.
    """

    logprobs: Tensor
    ids: Tensor
    index: Tensor
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the shapes.

        Raises:
            ShapeError: They do not fit.
        """
        shape = self.ids.shape
        if len(shape) != 2 or shape[1] < 1 or self.logprobs.shape != shape or self.index.shape != shape[:1]:
            raise ShapeError(
                "a teacher's ids and logprobs must be [M, K + 1] and its index [M]; found "
                f"{list(shape)}, {list(self.logprobs.shape)} and {list(self.index.shape)}."
            )

    def __len__(self) -> int:
        return len(self.index)

    def select(self, rows: Tensor | slice) -> "TeacherTokens":
        """Those of some tokens."""
        hidden = None if self.hidden is None else self.hidden[rows]
        return TeacherTokens(logprobs=self.logprobs[rows], ids=self.ids[rows], index=self.index[rows], hidden=hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenComparison:
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
    def joined(parts: Sequence["TokenComparison"]) -> "TokenComparison":
        """Those of consecutive tokens as one."""
        return TokenComparison(**{name: torch.cat([getattr(part, name) for part in parts]) for name in MEASURES})

    def columns(self) -> Mapping[str, Tensor]:
        """By name."""
        return {name: getattr(self, name) for name in MEASURES}


MEASURES = tuple(one.name for one in fields(TokenComparison))


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

    def __call__(self, logits: Tensor, teacher: TeacherTokens) -> TokenComparison:
        """Compare a student with its teachers.

        Args:
            logits: [M, V / ranks] of the student.
            teacher: Of the same tokens.

        Raises:
            DataError: The teachers gave no likeliest tokens, or no hidden states, and they are needed.
            ShapeError: The shapes do not fit.
        """
        if len(logits) != len(teacher):
            raise ShapeError(f"logits and teacher must be of equally many tokens; found {len(logits)}, {len(teacher)}.")
        top_ids, log_p = teacher.ids[:, 1:], teacher.logprobs[:, 1:].to(_float_of(logits))
        is_given = top_ids >= 0
        if self.options.distribution == "full":
            found, log_q = self._compare_all(logits, teacher)
        else:
            found, log_q = self._compare_top_k(logits, teacher)
        with torch.no_grad():
            k = top_ids.shape[1]
            q, p = (torch.where(is_given, of.detach().exp(), 0.0).sum(-1) for of in (log_q, log_p))
            best = likeliest(logits, k, part=self.part)[1] if k else top_ids
            is_shared = _is_among(top_ids, best) & is_given
            measured = {
                "student_mass": q,
                "teacher_mass": p,
                "tail_mass": (1.0 - p).clamp_min(0.0),
                "overlap_ratio": is_shared.sum(-1) / is_given.sum(-1).clamp_min(1),
                "agreement": (top_ids[:, :1] == best[:, :1]).any(-1),
                "clamped_fraction": found.is_clamped,
            }
        is_scored = teacher.index >= 0
        rest = {name: torch.where(is_scored, value.to(log_p.dtype), 0.0) for name, value in measured.items()}
        return TokenComparison(losses=torch.where(is_scored, found.losses, 0.0), **rest)

    def _compare_top_k(self, logits: Tensor, teacher: TeacherTokens) -> tuple[TokenDivergence, Tensor]:
        """The divergence on the top k, and the student's logprobs of the teacher's."""
        ids = teacher.ids[:, 1:]
        if not ids.shape[1]:
            raise DataError(
                f"{self.options.kind} needs the teacher's likeliest tokens; the column teacher_ids has the sampled "
                "token alone. Score with top_k of at least 1."
            )
        is_given = ids >= 0
        log_p = teacher.logprobs[:, 1:].to(_float_of(logits))
        own = likeliest(logits, ids.shape[1], part=self.part)[1] if self.options.kind == "uld" else ids
        log_q, log_q_tail = top_k_logprobs(logits, own, part=self.part, temperature=self.options.temperature)
        found = top_k_divergence(
            log_p,
            log_q,
            log_q_tail,
            is_given=is_given,
            has_tail=ids.shape[1] < self.part.size,
            options=self.options,
        )
        return found, log_q

    def _compare_all(self, logits: Tensor, teacher: TeacherTokens) -> tuple[TokenDivergence, Tensor]:
        """The divergence on the whole vocabulary, and the student's logprobs of the teacher's likeliest."""
        log_p = all_logprobs(self._teacher_logits(teacher), part=self.part, temperature=self.options.temperature)
        log_q = all_logprobs(logits, part=self.part, temperature=self.options.temperature)
        losses = sum_of_parts(divergence_terms(log_p, log_q, self.options).sum(-1), self.part)
        is_bitten = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        if self.options.min_logprob is not None:
            low = ((log_p < self.options.min_logprob) | (log_q.detach() < self.options.min_logprob)).any(-1)
            is_bitten = self.part.summed(low.float()) > 0
        at_top = chosen_of(log_q, teacher.ids[:, 1:], width=logits.shape[-1], part=self.part)
        return clamped(losses, is_bitten, self.options), at_top

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
        logits = hidden.new_zeros(len(hidden), self.heads[0].shape[0])
        for number, head in enumerate(self.heads):
            rows = (teacher.index == number).nonzero().squeeze(1)
            if len(rows):
                logits[rows] = (hidden[rows, : head.shape[1]].to(head.dtype) @ head.T).to(logits.dtype)
        return logits


def teacher_tokens(micro: MicroBatch, tokens: Tensor | None = None) -> TeacherTokens:
    """What teachers said of tokens of a micro-batch.

    Args:
        micro: With their columns.
        tokens: [M] int64 which; all without.

    Raises:
        DataError: A column is missing.
    """
    who = "a comparison with teachers"
    rows: Tensor | slice = slice(None) if tokens is None else tokens
    logprobs, ids, index = (
        needed_column(micro, name, who=who)[rows] for name in ("teacher_logprobs", "teacher_ids", "teacher_index")
    )
    hidden = micro.columns.get("teacher_hidden")
    return TeacherTokens(logprobs=logprobs, ids=ids, index=index, hidden=None if hidden is None else hidden[rows])


def _is_among(ids: Tensor, others: Tensor) -> Tensor:
    """[M, K] bool, where an id is among the others of its row."""
    if not ids.shape[-1] or not others.shape[-1]:
        return torch.zeros_like(ids, dtype=torch.bool)
    ordered = others.sort(-1).values
    places = torch.searchsorted(ordered, ids.contiguous()).clamp_max(ordered.shape[-1] - 1)
    return ordered.gather(-1, places) == ids


def _float_of(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
