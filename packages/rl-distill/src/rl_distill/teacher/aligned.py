"""Scores from a teacher with another tokenizer, which reads the student's text in its own tokens.

Spans of equal text map the scores back to the student's tokens. The text is the student's, including its chat template;
each side uses its own token for the end of a sequence. Prompt, responses and tool outputs are encoded one by one, so
that no span of a response extends into another part.

Source: Boizard et al. 2024, arXiv:2402.12030 (ULD); Patiño et al. 2025, Hugging Face, "Unlocking on-policy distillation
for any model family" (GOLD), which aligns by spans of equal text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_core.data import BoolArray, FloatArray, IntArray
from rl_core.errors import DataError, ShapeError
from rl_core.files import preview
from rl_core.record_fields import converts_arguments
from rl_distill.teacher.scores import NO_TOKEN, TeacherRow, TeacherScores
from rl_distill.teacher.vocabulary import TOKENIZER, read_vocabulary, token_bytes

Piece: TypeAlias = bytes | str
"""Content of a token: bytes of text, or the role of a special token, e.g. "end"."""


class Span(NamedTuple):
    """Tokens on both sides that cover the same part of the text.

    Attributes:
        student_start: First token of the student.
        student_stop: End of the student's tokens, exclusive.
        teacher_start: First token of the teacher.
        teacher_stop: End of the teacher's tokens, exclusive.
    """

    student_start: int
    student_stop: int
    teacher_start: int
    teacher_stop: int


def align_spans(student: Sequence[Piece], teacher: Sequence[Piece]) -> list[Span]:
    """Split both sides into the smallest spans of tokens with equal text; in order, covering every token once.

    Text is compared by bytes, so a character that one side splits into several tokens ends at its last byte. Roles
    align with equal roles, and no span crosses one. A token without bytes belongs to the previous span, or at the start
    to the first one.

    Raises:
        DataError: The texts of the two sides differ.
    """
    student_ends, teacher_ends = _ends(student), _ends(teacher)
    _check_equal(student, teacher)
    if not student or not teacher:
        return []
    common = np.intersect1d(student_ends, teacher_ends)
    common = common[common > 0] if common[-1] > 0 else common
    student_stops = np.searchsorted(student_ends, common, side="right").tolist()
    teacher_stops = np.searchsorted(teacher_ends, common, side="right").tolist()
    starts = zip([0, *student_stops], [0, *teacher_stops], strict=True)
    return [
        Span(first, stop, other_first, other_stop)
        for (first, other_first), stop, other_stop in zip(starts, student_stops, teacher_stops, strict=False)
    ]


def _ends(pieces: Sequence[Piece]) -> NDArray[np.int64]:
    """Return the end of each piece in bytes, [number of pieces]; a role counts as one byte."""
    return np.cumsum([len(piece) if isinstance(piece, bytes) else 1 for piece in pieces], dtype=np.int64)


def _check_equal(student: Sequence[Piece], teacher: Sequence[Piece]) -> None:
    """Check that both sides have the same text."""
    own, other = _parts(student), _parts(teacher)
    if own == other:
        return
    at = next((place for place, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(own), len(other)) if at is None else at
    raise DataError(
        f"student and teacher must have the same text to be aligned; they differ at part {place}: student "
        f"{_preview(own, place)}, teacher {_preview(other, place)}. A tokenizer that changes the text cannot be "
        "aligned."
    )


def _parts(pieces: Sequence[Piece]) -> list[Piece]:
    """Split pieces into roles and the text between them."""
    parts: list[Piece] = []
    text: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            text.append(piece)
        else:
            parts += [b"".join(text), piece]
            text = []
    return [*parts, b"".join(text)]


def _preview(parts: Sequence[Piece], place: int) -> str:
    return preview(parts[place]) if place < len(parts) else "nothing"


Encode = Callable[[Sequence[str]], list[list[int]]]
"""Returns the token ids of each text, without special tokens around it."""
SpanMode = Literal["sampled", "top_k", "uld"]
END = "end"
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPieces:
    """Text of a tokenizer's tokens.

    Attributes:
        pieces: Bytes of each token's text, or `END`, by token id.
        end_ids: Tokens that end a sequence; the first one stands for the other tokenizer's end tokens.
        begin_ids: Tokens that precede every text.
    """

    pieces: dict[int, Piece]
    end_ids: tuple[int, ...] = ()
    begin_ids: tuple[int, ...] = ()


@converts_arguments
def read_pieces(folder: Path, *, end_ids: Sequence[int], begin_ids: Sequence[int] = ()) -> TokenPieces:
    """Read the text of each token from the tokenizer in a model folder.

    Args:
        folder: Folder with `tokenizer.json`.
        end_ids: See `TokenPieces.end_ids`.
        begin_ids: See `TokenPieces.begin_ids`.

    Raises:
        SettingsError: The file is missing, or its decoder does not define the bytes of each token.
    """
    found = read_vocabulary(folder)
    octets = token_bytes(found.tokens, added=found.added, decoder=found.decoder, where=str(folder / TOKENIZER))
    return TokenPieces(
        pieces={**octets, **dict.fromkeys(end_ids, END)}, end_ids=tuple(end_ids), begin_ids=tuple(begin_ids)
    )


class Translation(NamedTuple):
    """A trajectory in the teacher's tokens.

    Attributes:
        row: The teacher's tokens; loss_mask is True where trained spans of the student need a score.
        spans: [S, 4] int64 trained spans, with the fields of `Span`.
    """

    row: TeacherRow
    spans: NDArray[np.int64]


class TeacherAligner:
    """Translates the student's text to the teacher's tokens, and the teacher's scores to the student's tokens."""

    def __init__(self, student: TokenPieces, teacher: TokenPieces, encode: Encode, *, mode: SpanMode) -> None:
        """Compare the two vocabularies' texts.

        Args:
            student: Tokens of the policy.
            teacher: Tokens of the teacher.
            encode: Encodes texts with the teacher's tokenizer.
            mode: Use of the scores: "sampled" (estimators of a span's log ratio), "top_k" (divergences, at spans of one
                token on each side), or "uld" (sorted probabilities at each span's first token).
        """
        self._student, self._teacher = student, teacher
        self._encode = encode
        self._mode = mode
        self._lock = Lock()  # tokenizers may not be thread-safe
        self._student_ids = _student_ids(student, teacher)

    def to_teacher(self, row: TeacherRow) -> Translation:
        """Translate a trajectory to the teacher's tokens, ignoring tokens without a known text."""
        skipped = len(self._student.begin_ids)
        begins = tuple(row.input_ids[:skipped].tolist()) == self._student.begin_ids
        pieces = [self._student.pieces.get(token) for token in row.input_ids.tolist()]
        runs = list(_runs(pieces, row.loss_mask, start=skipped if begins else 0))
        texts = [run.text for run in runs if run.text is not None]
        with self._lock:
            encoded = iter(self._encode(texts) if texts else [])
        ids, spans = [*self._teacher.begin_ids], list[Span]()
        for run in runs:
            own = [self._teacher.end_ids[0]] if run.text is None else next(encoded)
            if run.trains:
                spans += self._spans(run, own, len(ids))
            ids += own
        table = np.asarray(spans, dtype=np.int64).reshape(-1, 4)
        table = table[table[:, 2] > 0]  # the first token has no prediction
        mask = np.zeros(len(ids), dtype=np.bool_)
        for _, _, start, stop in table.tolist():
            mask[start:stop] = True
        translated = TeacherRow(key=row.key, input_ids=np.asarray(ids, dtype=np.int32), loss_mask=mask)
        return Translation(translated, table)

    def to_student(
        self, scores: TeacherScores, row: TeacherRow, translation: Translation, *, rollout_logprobs: FloatArray
    ) -> TeacherScores:
        """Map scores to the student's tokens; tokens without a score get logprob 0 and id -1.

        Args:
            scores: [T', K + 1] scores of the translated row.
            row: The student's trajectory.
            translation: Result of `to_teacher`.
            rollout_logprobs: [T] the student's logprobs, used for the log ratio of a span.

        Returns:
            [T, K + 1] scores. In mode "sampled", logprobs are the student's plus an equal share of the span's log
            ratio, and may be above 0. In mode "uld", ids are the teacher's.

        Raises:
            ShapeError: The scores do not match the translated row.
        """
        has_scores = scores.logprobs.shape[:1] == translation.row.input_ids.shape
        if not has_scores or rollout_logprobs.shape != row.input_ids.shape:
            raise ShapeError(
                f"scores must have {len(translation.row.input_ids)} rows, one per translated token, and "
                f"rollout_logprobs {len(row.input_ids)}, one per token; found {list(scores.logprobs.shape)} and "
                f"{list(rollout_logprobs.shape)}."
            )
        size = (len(row.input_ids), scores.logprobs.shape[1])
        found = TeacherScores(
            logprobs=np.zeros(size, dtype=np.float32), token_ids=np.full(size, NO_TOKEN, dtype=np.int32)
        )
        if self._mode == "sampled":
            _put_ratios(found, scores, row, spans=translation.spans, rollout_logprobs=rollout_logprobs)
        elif self._mode == "uld":
            own, other = translation.spans[:, 0], translation.spans[:, 2]
            found.logprobs[own], found.token_ids[own] = scores.logprobs[other], scores.token_ids[other]
            found.token_ids[own, 0] = row.input_ids[own]
        else:
            self._put_likeliest(found, scores, row, spans=translation.spans)
        return found

    def _put_likeliest(
        self, found: TeacherScores, scores: TeacherScores, row: TeacherRow, *, spans: NDArray[np.int64]
    ) -> None:
        """Copy the teacher's most likely tokens, as the student's ids, at spans of one token on each side."""
        spans = spans[(spans[:, 1] - spans[:, 0] == 1) & (spans[:, 3] - spans[:, 2] == 1)]
        own, other = spans[:, 0], spans[:, 2]
        tokens = row.input_ids[own][:, None]
        ids, logprobs = scores.token_ids[other], scores.logprobs[other]
        is_own = ids[:, 1:] == ids[:, :1]
        mapped = self._student_ids[np.where(ids[:, 1:] < len(self._student_ids), ids[:, 1:], NO_TOKEN)]
        # Another token with the same text is dropped: the token itself is already listed.
        mapped = np.where(mapped == tokens, NO_TOKEN, mapped)
        mapped = np.where(is_own, tokens, mapped)
        order = np.argsort(mapped == NO_TOKEN, axis=1, kind="stable")
        mapped = np.take_along_axis(mapped, order, axis=1)
        top = np.where(mapped == NO_TOKEN, 0, np.take_along_axis(logprobs[:, 1:], order, axis=1))
        found.token_ids[own] = np.concatenate([tokens, mapped], axis=1)
        found.logprobs[own] = np.concatenate([logprobs[:, :1], top], axis=1)

    def _spans(self, run: "_Run", ids: Sequence[int], place: int) -> list[Span]:
        """Return a run's spans, positioned in both trajectories; none if the teacher's tokenizer changes the text."""
        other: list[Piece] = [self._teacher.pieces.get(token, b"") for token in ids]
        if run.text is not None and other and isinstance(other[0], bytes) and isinstance(run.pieces[0], bytes):
            total = sum(len(piece) for piece in run.pieces)
            if other[0][:1] == b" " and sum(len(piece) for piece in other) == total + 1:
                other[0] = other[0][1:]  # some tokenizers add a space before every text
        try:
            spans = align_spans(run.pieces, other)
        except DataError:
            return []
        return [
            Span(run.start + first, run.start + stop, place + other_first, place + other_stop)
            for first, stop, other_first, other_stop in spans
            if all(run.is_text[first:stop])
        ]


class _Run(NamedTuple):
    """Tokens of a trajectory that are encoded together.

    Attributes:
        start: Index of the first token.
        pieces: Text of each token; bytes that are not valid UTF-8 are those of the replacement character.
        is_text: For each token, whether its text is known and unchanged in `text`.
        text: Text of all tokens; None for an end token.
        trains: Whether all tokens of the run are trained.
    """

    start: int
    pieces: list[Piece]
    is_text: list[bool]
    text: str | None
    trains: bool


def _runs(pieces: Sequence[Piece | None], mask: BoolArray, *, start: int) -> list[_Run]:
    """Split a trajectory where the loss mask changes, and around end tokens."""
    is_role = np.asarray([isinstance(piece, str) for piece in pieces], dtype=np.bool_)
    cuts = {start, len(pieces), *(np.flatnonzero(np.diff(mask)) + 1).tolist()}
    for place in np.flatnonzero(is_role).tolist():
        cuts |= {place, place + 1}
    runs = []
    for first, stop in pairwise(sorted(cut for cut in cuts if cut >= start)):
        own = pieces[first:stop]
        trains = bool(mask[first])
        if is_role[first]:
            runs.append(_Run(first, [END], [True], None, trains))
        else:
            readable, is_text, text = _readable([piece if isinstance(piece, bytes) else b"" for piece in own])
            is_known = [piece is not None for piece in own]
            runs.append(_Run(first, readable, list(map(min, is_text, is_known)), text, trains))
    return runs


def _readable(pieces: Sequence[bytes]) -> tuple[list[Piece], list[bool], str]:
    """Return the pieces, whether each is unchanged, and their text; invalid bytes become the replacement character."""
    raw = b"".join(pieces)
    ends = np.cumsum([0, *(len(piece) for piece in pieces)]).tolist()
    text, places, is_text = "", list[int](), np.ones(len(raw) + 1, dtype=np.bool_)
    at = size = 0  # bytes read and written so far
    while at < len(raw):
        try:
            good, bad = raw[at:].decode(), 0
        except UnicodeDecodeError as error:
            good, bad = raw[at : at + error.start].decode(), error.end - error.start
        num_good = len(good.encode())
        places += range(size, size + num_good)
        text, at, size = text + good, at + num_good, size + num_good
        if bad:
            is_text[at : at + bad] = False
            size += len(REPLACEMENT.encode())
            places += [size - len(REPLACEMENT.encode()), *[size] * (bad - 1)]
            text, at = text + REPLACEMENT, at + bad
    written = text.encode()
    places.append(size)
    changed: list[Piece] = [written[places[first] : places[stop]] for first, stop in pairwise(ends)]
    return changed, [bool(is_text[first:stop].all()) for first, stop in pairwise(ends)], text


def _put_ratios(
    found: TeacherScores,
    scores: TeacherScores,
    row: TeacherRow,
    *,
    spans: NDArray[np.int64],
    rollout_logprobs: FloatArray,
) -> None:
    """Set each token of a span to the student's logprob plus an equal share of the span's log ratio."""
    sums = [
        np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
        for values in (rollout_logprobs, scores.logprobs[:, 0])
    ]
    lengths = spans[:, 1] - spans[:, 0]
    of_student = sums[0][spans[:, 1]] - sums[0][spans[:, 0]]
    of_teacher = sums[1][spans[:, 3]] - sums[1][spans[:, 2]]
    own = np.concatenate([np.arange(first, stop) for first, stop, _, _ in spans.tolist()] or [np.arange(0)])
    share = np.repeat((of_teacher - of_student) / np.maximum(lengths, 1), lengths)
    found.logprobs[own, 0] = rollout_logprobs[own] + share
    found.token_ids[own, 0] = row.input_ids[own]


def _student_ids(student: TokenPieces, teacher: TokenPieces) -> IntArray:
    """Return [teacher's ids + 1] the student's token with the same text; -1 for none, and for the teacher's id -1."""
    own = {piece: index for index, piece in sorted(student.pieces.items(), reverse=True) if piece and piece != END}
    size = max(teacher.pieces, default=0) + 2
    table = np.full(size, NO_TOKEN, dtype=np.int32)
    seen: set[Piece] = set()
    for index, piece in sorted(teacher.pieces.items()):
        if piece in own and piece not in seen:
            table[index] = own[piece]
            seen.add(piece)
    if student.end_ids and teacher.end_ids:
        table[teacher.end_ids[0]] = student.end_ids[0]
    return table
