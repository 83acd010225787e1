"""Alignment of two tokenizers' tokens over the same text, as pure functions.

Source: Boizard et al. 2024, arXiv:2402.12030 (ULD); Patiño et al. 2025, Hugging Face, "Unlocking on-policy distillation
for any model family" (GOLD), which aligns by spans of equal text.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError
from rl_core.files import preview

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
        f"{_shown(own, place)}, teacher {_shown(other, place)}. A tokenizer that changes the text cannot be aligned."
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


def _shown(parts: Sequence[Piece], place: int) -> str:
    return preview(parts[place]) if place < len(parts) else "nothing"
