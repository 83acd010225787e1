"""A teacher's scores of a trajectory: checks, masking and columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import BoolArray, Column, FloatArray, Index, IntArray, Ragged, RowKey
from rl_core.errors import TeacherError
from rl_core.record_fields import Axes, record

NO_TOKEN = -1
"""Token id where the teacher returned no token."""
NO_TEACHER = -1
"""`teacher_index` of a token that no teacher scored."""
TOLERANCE = 1e-4
"""Rounding tolerance of float32 logprobs: above 0, or above the previous one."""
PADDING_LOGPROB = float(np.log(1e-3))
"""Padding tokens of a vocabulary, which no tokenizer produces, are less likely than this."""
AGREEMENT = 1e-2
"""Tolerance between two logprobs of one token, and of a sum of probabilities above 1."""


@record
class TeacherRow:
    """A trajectory to be scored by a teacher.

    Attributes:
        key: Key of the trajectory.
        input_ids: [T] int32 tokens of prompt and response.
        loss_mask: [T] bool, True at trained tokens.
    """

    key: RowKey
    input_ids: Annotated[IntArray, Axes("T")]
    loss_mask: Annotated[BoolArray, Axes("T")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """A teacher's scores of one trajectory; row t is the prediction of token t from the tokens before it.

    Attributes:
        logprobs: [T, K + 1] float32 logprobs of the sampled token and of the K most likely tokens, in descending order.
        token_ids: [T, K + 1] int32 token ids of these logprobs; -1, with logprob 0, where the teacher returned fewer.
        hidden: [T, H] float32 hidden states that predict each token; None unless requested.
    """

    logprobs: FloatArray
    token_ids: IntArray
    hidden: FloatArray | None = None

    @property
    def size_bytes(self) -> int:
        """Size in memory, in bytes."""
        return self.logprobs.nbytes + self.token_ids.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


@record
class ScoreShape:
    """Expected shape of scores.

    Attributes:
        top_k: Number K of most likely tokens.
        vocab_size: Exclusive upper bound of token ids. Unlikely ids above it, from a teacher with a padded vocabulary,
            count as not returned; likely ones are an error.
        hidden_size: Width H of the hidden states; None unless requested.
    """

    top_k: int
    vocab_size: int
    hidden_size: int | None = None


_Fault = tuple[BoolArray, str, NDArray[np.generic], str]
"""[T] bool of invalid tokens, expected value, found values, and remedy."""


def check_scores(scores: TeacherScores, row: TeacherRow, *, teacher: str, shape: ScoreShape) -> TeacherScores:
    """Check scores, and mask untrained tokens.

    Args:
        scores: The teacher's scores.
        row: The scored trajectory.
        teacher: The teacher's name, for errors.
        shape: Expected shape.

    Returns:
        Scores with logprobs 0, ids -1 and hidden states 0 where `loss_mask` is False; logprobs above 0 by rounding are
        clamped.

    Raises:
        TeacherError: The scores are invalid; the message names the trajectory, the first invalid token and the remedy.
    """
    _check_shapes(scores, row, teacher=teacher, shape=shape)
    scores, trains = _without_padding(scores, shape), row.loss_mask
    for is_wrong, expected, found, advice in _faults(scores, row, shape):
        at = np.flatnonzero(is_wrong & trains)
        if len(at):
            raise _error(
                row,
                teacher,
                f"token {at[0]} (id {row.input_ids[at[0]]}): expected {expected}; found "
                f"{np.array2string(np.asarray(found[at[0]]), threshold=8)}, as at {len(at)} of {int(trains.sum())} "
                f"trained tokens. {advice}",
            )
    kept = trains[:, None]
    hidden = scores.hidden
    return replace(
        scores,
        logprobs=np.where(kept, np.minimum(scores.logprobs, 0), 0).astype(np.float32),
        token_ids=np.where(kept, scores.token_ids, NO_TOKEN).astype(np.int32),
        hidden=None if hidden is None else np.where(kept, hidden, 0).astype(np.float32),
    )


def empty_scores(row: TeacherRow, shape: ScoreShape) -> TeacherScores:
    """Return the scores of a trajectory without trained tokens."""
    size = (len(row.input_ids), shape.top_k + 1)
    hidden = None if shape.hidden_size is None else np.zeros((size[0], shape.hidden_size), dtype=np.float32)
    return TeacherScores(
        logprobs=np.zeros(size, dtype=np.float32), token_ids=np.full(size, NO_TOKEN, dtype=np.int32), hidden=hidden
    )


def teacher_columns(
    scores: Sequence[TeacherScores],
    *,
    indices: Sequence[int],
    offsets: Index,
    hidden_size: int | None = None,
) -> Mapping[str, Column]:
    """Build columns, aligned with `input_ids`, from checked scores.

    Args:
        scores: Scores of each row, in the batch's order.
        indices: Teacher index of each row.
        offsets: [N + 1] offsets of the batch's `input_ids`.
        hidden_size: Maximum width of the teachers' hidden states; narrower ones are padded with zeros. None omits them.
    """
    numbers = [
        np.where(one.token_ids[:, 0] == NO_TOKEN, NO_TEACHER, index).astype(np.int16)
        for one, index in zip(scores, indices, strict=True)
    ]
    columns: dict[str, Column] = {
        "teacher_logprobs": Ragged(np.concatenate([one.logprobs for one in scores]), offsets),
        "teacher_ids": Ragged(np.concatenate([one.token_ids for one in scores]), offsets),
        "teacher_index": Ragged(np.concatenate(numbers), offsets),
    }
    if hidden_size is not None:
        states = np.zeros((int(offsets[-1]), hidden_size), dtype=np.float32)
        for one, start, end in zip(scores, offsets[:-1], offsets[1:], strict=True):
            if one.hidden is not None:
                states[start:end, : one.hidden.shape[1]] = one.hidden
        columns["teacher_hidden"] = Ragged(states, offsets)
    return columns


def _check_shapes(scores: TeacherScores, row: TeacherRow, *, teacher: str, shape: ScoreShape) -> None:
    length = len(row.input_ids)
    expected: dict[str, tuple[int, int] | None] = {
        "logprobs": (length, shape.top_k + 1),
        "token_ids": (length, shape.top_k + 1),
        "hidden": None if shape.hidden_size is None else (length, shape.hidden_size),
    }
    for name, wanted in expected.items():
        array = getattr(scores, name)
        found = None if array is None else array.shape
        if found != wanted:
            raise _error(
                row,
                teacher,
                f"{name} must have shape {_written(wanted)} for {length} tokens and top_k = {shape.top_k}; found "
                f"{_written(found)}. The teacher did not score this trajectory as requested; check its log.",
            )


def _without_padding(scores: TeacherScores, shape: ScoreShape) -> TeacherScores:
    """Replace padding tokens of a larger vocabulary with id -1 and logprob 0, behind the other tokens."""
    ids, logprobs = scores.token_ids, scores.logprobs
    is_padding = (ids >= shape.vocab_size) & (logprobs < PADDING_LOGPROB)
    is_padding[:, 0] = False
    if not is_padding.any():
        return scores
    order = np.argsort(is_padding, axis=1, kind="stable")
    return replace(
        scores,
        token_ids=np.take_along_axis(np.where(is_padding, NO_TOKEN, ids), order, axis=1),
        logprobs=np.take_along_axis(np.where(is_padding, 0, logprobs), order, axis=1),
    )


def _faults(scores: TeacherScores, row: TeacherRow, shape: ScoreShape) -> Iterator[_Fault]:
    """Yield the possible faults of tokens, simplest first; later checks rely on earlier ones."""
    logprobs, ids = np.asarray(scores.logprobs, dtype=np.float32), scores.token_ids
    top, top_ids = logprobs[:, 1:], ids[:, 1:]
    is_given = top_ids != NO_TOKEN
    yield (
        _any(ids[:, :1] != row.input_ids[:, None]),
        "the token's own id first",
        ids[:, 0],
        "The teacher scored other token ids: it received different tokens, or shifts their positions.",
    )
    yield (
        _any((ids < NO_TOKEN) | (ids >= shape.vocab_size)),
        f"token ids below {shape.vocab_size}, the size of the vocabulary",
        ids,
        'Use a teacher with the student\'s vocabulary, or set distillation.other_tokenizer = "align".',
    )
    yield (
        _any(~np.isfinite(logprobs)),
        "finite logprobs",
        logprobs,
        'Its weights or its arithmetic are faulty: try dtype = "float32", and check the model\'s files.',
    )
    yield (
        _any(logprobs > TOLERANCE),
        "logprobs <= 0",
        logprobs,
        "These are not logprobs; the teacher's engine returns other values.",
    )
    yield (
        _any((np.diff(top, axis=1) > TOLERANCE) & is_given[:, 1:]),
        "the most likely tokens in descending order",
        top,
        "The teacher's engine orders them differently.",
    )
    yield (
        _any((np.abs(top - logprobs[:, :1]) > AGREEMENT) & (top_ids == ids[:, :1])),
        "one logprob for the token, on its own and among the most likely tokens",
        logprobs,
        "The teacher's engine mixes up positions.",
    )
    mass = np.where(is_given, np.exp(np.minimum(top, 0.0)), 0.0).sum(axis=1)
    yield (
        _any(mass[:, None] > 1 + AGREEMENT),
        "probabilities of distinct tokens, with a sum of at most 1",
        mass,
        "The teacher's engine returns tokens twice, or values that are not probabilities.",
    )
    if scores.hidden is not None:
        yield (
            _any(~np.isfinite(scores.hidden)),
            "finite hidden states",
            scores.hidden,
            'Its weights or its arithmetic are faulty: try dtype = "float32", and check the model\'s files.',
        )


def _any(is_wrong: Any) -> BoolArray:
    """Return [T] True where any value of a token is invalid."""
    found: BoolArray = np.any(np.asarray(is_wrong), axis=1)
    return found


def _error(row: TeacherRow, teacher: str, problem: str) -> TeacherError:
    uid, session, output = row.key
    return TeacherError(
        f"teacher {teacher!r} on prompt {uid!r}, session {session}, output {output}: {problem}", teacher=teacher
    )


def _written(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


PROBE_TOKENS = 4
"""Number of tokens in the sequence."""
PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Maximum difference from the earlier logprobs, by dtype."""


def probe_row(vocab_size: int) -> TeacherRow:
    """Return the sequence, made of the first tokens of a vocabulary."""
    ids = np.arange(1, PROBE_TOKENS + 1, dtype=np.int32) % vocab_size
    mask: Any = np.arange(PROBE_TOKENS) > 0
    return TeacherRow(key=RowKey("probe", 0, 0), input_ids=ids, loss_mask=mask)


def probe_problem(answer: TeacherScores, first: TeacherScores, *, dtype: str, what: str) -> str | None:
    """Describe what is wrong with a replica's answer; None if it is right.

    Args:
        answer: The replica's scores of the sequence.
        first: The first answer of any of the teacher's replicas.
        dtype: Computation dtype of the teacher.
        what: When the sequence was scored, for the message.
    """
    found, expected = answer.logprobs[1:, 0], first.logprobs[1:, 0]
    if not np.isfinite(answer.logprobs).all():
        return (
            f"must return finite logprobs; it scored a short sequence {what} as {found.tolist()}. Check its weights "
            "for NaN or infinite values."
        )
    if not float(np.abs(found - expected).max()) <= PROBE_TOLERANCES[dtype]:
        return (
            f"must score a short sequence {what} as before; its logprobs were {expected.tolist()}, and are now "
            f"{found.tolist()}. Its weights changed: set sleep = false for it, and check its log."
        )
    return None
