"""Teachers' logprobs and ids of tokens for divergences, checked on creation."""

import torch
from torch import Tensor

from rl_core.errors import DataError, ShapeError
from rl_core.record_fields import converts_arguments, record
from rl_distill.learner import MicroBatch
from rl_distill.objectives.micro_batches import needed_column
from rl_distill.objectives.shapes import AGREEMENT

MAX_MASS = 1.05
"""Maximum sum of probabilities; above 1, since bfloat16 logprobs are rounded."""

BUILD = "Pass only the top K to `TeacherTokens.from_top_k`, or score the sampled tokens too."
TAKE_LOGS = "Pass `log_softmax` of its logits, not logits or probabilities."
PACK = "For padded rows, pass only the trained tokens, `ids[mask]` and `logprobs[mask]`."
"""Remedies used in messages."""


@record
class TeacherTokens:
    """Teachers' data of M tokens, without gradient.

    Attributes:
        logprobs: [M, K + 1] logprobs of the sampled token and of the teacher's K most likely tokens, in descending
            order.
        ids: [M, K + 1] token ids of these logprobs; -1 for none. Stored as int64.
        index: [M] integer index of the teacher that scored the token; -1 for none, and the token is then ignored.
        hidden: [M, H] the teacher's hidden states, for full distributions; else None.
    """

    logprobs: Tensor
    ids: Tensor
    index: Tensor
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes and dtypes; on a CPU also the values, in a few passes over [M, K + 1].

        Raises:
            ShapeError: The shapes or dtypes do not match.
            DataError: A scored token has NaN, probabilities or logits instead of logprobs, or an id below -1.
        """
        shape = self.ids.shape
        dtypes = [one.dtype for one in (self.ids, self.logprobs, self.index)]
        if [one.is_floating_point for one in dtypes] != [False, True, False] or torch.bool in dtypes:
            raise ShapeError(
                "a teacher's ids and index must have integer dtypes, its logprobs a float dtype; found ids of "
                f"{dtypes[0]}, logprobs of {dtypes[1]}, index of {dtypes[2]}. Are two of them swapped?"
            )
        object.__setattr__(self, "ids", self.ids.long())
        object.__setattr__(self, "logprobs", self.logprobs.detach())
        if len(shape) != 2 or shape[1] < 1 or self.logprobs.shape != shape or self.index.shape != shape[:1]:
            raise ShapeError(
                "a teacher's ids and logprobs must be [M, K + 1] and its index [M]; found "
                f"{list(shape)}, {list(self.logprobs.shape)} and {list(self.index.shape)}. {PACK}"
            )
        if self.logprobs.device.type == "cpu":
            _check_values(self)

    @classmethod
    @converts_arguments
    def from_top_k(
        cls,
        ids: Tensor,
        logprobs: Tensor,
        *,
        sampled: tuple[Tensor, Tensor] | None = None,
        index: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> "TeacherTokens":
        """Create the tokens from the K most likely ones and, separately, the sampled one.

        From padded rows [B, T, K], first select the trained tokens: `ids[mask]`, `logprobs[mask]`.

        Args:
            ids: [M, K] token ids, the most likely first.
            logprobs: [M, K] logprobs of these tokens.
            sampled: ([M] sampled tokens, [M] the teacher's logprobs of them); divergences need neither.
            index: [M] index of the teacher; None if a single teacher scored all tokens.
            hidden: [M, H] the teacher's hidden states.

        Raises:
            ShapeError: The shapes or dtypes do not match.
            DataError: The values are invalid; see `__post_init__`.
        """
        if ids.ndim != 2 or logprobs.shape != ids.shape:
            raise ShapeError(
                f"ids and logprobs must be [M, K]; found {list(ids.shape)} and {list(logprobs.shape)}. {PACK}"
            )
        tokens, own = (torch.full_like(ids[:, 0], -1), torch.zeros_like(logprobs[:, 0])) if sampled is None else sampled
        return cls(
            ids=torch.cat([tokens.unsqueeze(-1), ids], -1),
            logprobs=torch.cat([own.unsqueeze(-1), logprobs], -1),
            index=torch.zeros(len(ids), dtype=torch.int64, device=ids.device) if index is None else index,
            hidden=hidden,
        )

    def __len__(self) -> int:
        return len(self.index)

    def select(self, rows: Tensor | slice) -> "TeacherTokens":
        """Return the data of some tokens."""
        hidden = None if self.hidden is None else self.hidden[rows]
        return TeacherTokens(logprobs=self.logprobs[rows], ids=self.ids[rows], index=self.index[rows], hidden=hidden)


def _check_values(teacher: TeacherTokens) -> None:
    """Check the teacher's logprobs and ids; the message names the first invalid token."""
    is_scored, logprobs = teacher.index >= 0, teacher.logprobs.detach()
    logprobs = logprobs.float().masked_fill(teacher.ids < 0, -torch.inf)
    masses = logprobs[:, 1:].exp().sum(-1)
    faults = (
        ("logprobs must not be NaN", logprobs.isnan().any(-1), logprobs, "Check its logits."),
        ("logprobs must be at most 0", (logprobs > AGREEMENT).any(-1), logprobs, TAKE_LOGS),
        ("most likely tokens must have probabilities that sum to at most 1", masses > MAX_MASS, masses, TAKE_LOGS),
        ("ids must be token ids, or -1 for none", (teacher.ids < -1).any(-1), teacher.ids, "Mask other tokens."),
    )
    for expected, is_wrong, values, advice in faults:
        is_wrong = is_wrong & is_scored
        if bool(is_wrong.any()):
            at = int(is_wrong.nonzero()[0])
            found = values[at].tolist() if values.ndim == 1 else values[at, :8].tolist()
            raise DataError(
                f"a teacher's {expected}; found {found} at token {at} ({int(is_wrong.sum())} such tokens in total). "
                f"{advice}"
            )


def teacher_tokens(micro: MicroBatch, tokens: Tensor | None = None) -> TeacherTokens:
    """Return the teachers' data for tokens of a micro-batch.

    Args:
        micro: Micro-batch with the teachers' columns.
        tokens: [M] int64 token indices; None for all tokens.

    Raises:
        DataError: A column is missing.
    """
    who = "a comparison with teachers"
    rows: Tensor | slice = slice(None) if tokens is None else tokens
    logprobs, ids, index = (
        needed_column(micro, name, who=who)[rows] for name in ("teacher_logprobs", "teacher_ids", "teacher_index")
    )
    check_sampled_tokens(ids[:, 0], micro.input_ids[rows], (index >= 0) & (ids[:, 0] >= 0))
    hidden = micro.columns.get("teacher_hidden")
    return TeacherTokens(logprobs=logprobs, ids=ids, index=index, hidden=None if hidden is None else hidden[rows])


def check_sampled_tokens(ids: Tensor, sampled: Tensor, is_scored: Tensor) -> None:
    """Check that a teacher scored the sampled tokens; skipped on GPUs, where reading values synchronizes.

    Args:
        ids: [M] token ids of the teacher's first column.
        sampled: [M] sampled tokens.
        is_scored: [M] bool, True at tokens that are compared.

    Raises:
        DataError: The tokens differ.
    """
    is_wrong = (ids != sampled) & is_scored
    if ids.device.type == "cpu" and bool(is_wrong.any()):
        at = int(is_wrong.nonzero()[0])
        raise DataError(
            "the first column of a teacher's ids must be the sampled token, followed by the K most likely ones; "
            f"found id {int(ids[at])} instead of {int(sampled[at])} at token {at} ({int(is_wrong.sum())} such tokens "
            f"in total). {BUILD}"
        )


def refuse_top_k_alone(teacher: TeacherTokens) -> None:
    """Reject a top K without the sampled token in the first column."""
    if teacher.ids.shape[1] < 2:
        return
    ids, logprobs = teacher.ids, teacher.logprobs
    is_given = (teacher.index >= 0) & (ids[:, :2] >= 0).all(-1)
    is_wrong = is_given & (ids[:, 0] != ids[:, 1]) & (logprobs[:, 0] > logprobs[:, 1] + AGREEMENT)
    if bool(is_wrong.any()):
        at = int(is_wrong.nonzero()[0])
        raise DataError(
            "the first column of a teacher's logprobs must be the sampled token's, followed by the K most likely "
            f"ones; found at token {at} id {int(ids[at, 0])} with {float(logprobs[at, 0]):.3g}, more likely than the "
            f"most likely one, id {int(ids[at, 1])} with {float(logprobs[at, 1]):.3g}. {BUILD}"
        )
