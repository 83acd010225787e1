"""Spans of equal text: every token is in one span, texts are equal, and no span can be split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_distill.teacher.aligned import Span, align_spans


def test_spans_of_two_words_by_hand():
    student = [b"dis", b"till", b"ation", b" works"]
    teacher = [b"distill", b"at", b"ion", b" works"]
    assert align_spans(student, teacher) == [Span(0, 2, 0, 1), Span(2, 3, 1, 3), Span(3, 4, 3, 4)]


def test_a_character_that_one_side_cuts_ends_with_its_last_byte():
    euro = "\u20ac".encode()  # bytes e2 82 ac
    assert align_spans([euro[:1], euro[1:], b"5"], [euro, b"5"]) == [Span(0, 2, 0, 1), Span(2, 3, 1, 2)]
    assert align_spans([euro[:1], euro[1:]], [euro[:2], euro[2:]]) == [Span(0, 2, 0, 2)]


def test_roles_align_with_each_other_whatever_their_text():
    spans = align_spans([b"ab", "end", b"c"], [b"a", b"b", "end", b"c"])
    assert spans == [Span(0, 1, 0, 2), Span(1, 2, 2, 3), Span(2, 3, 3, 4)]


def test_tokens_of_no_bytes_belong_to_the_span_before_or_to_the_first():
    assert align_spans([b"", b"a", b"", b"b"], [b"a", b"b"]) == [Span(0, 3, 0, 1), Span(3, 4, 1, 2)]
    assert align_spans([b""], [b"", b""]) == [Span(0, 1, 0, 2)]


@pytest.mark.parametrize("pieces", [[], [b""]])
def test_nothing_has_no_spans(pieces):
    assert align_spans(pieces, []) == []


@pytest.mark.parametrize(
    ("student", "teacher", "words"),
    [
        ([b"abc"], [b"abd"], "part 0: student b'abc', teacher b'abd'"),
        ([b"a"], [b"a", b"b"], "part 0: student b'a', teacher b'ab'"),
        ([b"a", "end"], [b"a"], "part 1: student 'end', teacher nothing"),
        ([b"a", "end"], [b"a", "begin"], "part 1: student 'end', teacher 'begin'"),
        (["end", b"a"], [b"a", "end"], "part 0: student b'', teacher b'a'"),
        ([b"end"], ["end"], "part 0: student b'end', teacher b''"),
    ],
)
def test_other_texts_are_refused(student, teacher, words):
    with pytest.raises(DataError) as caught:
        align_spans(student, teacher)
    assert words in str(caught.value)


def cut(units, places):
    """Cut a text of bytes and roles into pieces, at the given places and around each role."""
    pieces, current = [], b""
    for index, unit in enumerate(units):
        if isinstance(unit, str):
            pieces += [current, unit] if current else [unit]
            current = b""
        else:
            current += unit
            if index in places:
                pieces.append(current)
                current = b""
    return [*pieces, current] if current else pieces


@st.composite
def tokenized(draw):
    text = draw(st.text(alphabet="ab \u00e9\u20ac\U0001f600", max_size=12)).encode()
    units = [bytes([octet]) for octet in text]
    for place in draw(st.lists(st.integers(0, len(units)), max_size=3)):
        units.insert(place, draw(st.sampled_from(["end", "turn"])))
    places = st.sets(st.integers(0, max(len(units) - 1, 0)))
    return cut(units, draw(places)), cut(units, draw(places))


def ends(pieces):
    total, found = 0, []
    for piece in pieces:
        total += 1 if isinstance(piece, str) else len(piece)
        found.append(total)
    return found


def joined(pieces):
    return b"".join(piece if isinstance(piece, bytes) else b"\0" + piece.encode() + b"\0" for piece in pieces)


@given(tokenized())
def test_spans_have_every_token_once_with_equal_texts_and_are_the_smallest(sides):
    student, teacher = sides
    spans = align_spans(student, teacher)
    assert [token for span in spans for token in range(span.student_start, span.student_stop)] == [*range(len(student))]
    assert [token for span in spans for token in range(span.teacher_start, span.teacher_stop)] == [*range(len(teacher))]
    for span in spans:
        own = student[span.student_start : span.student_stop]
        other = teacher[span.teacher_start : span.teacher_stop]
        assert own
        assert other
        assert joined(own) == joined(other)
        assert set(ends(own)[:-1]) & set(ends(other)[:-1]) == set()  # no inner boundary is common to both sides


@given(tokenized())
def test_alignment_is_the_same_from_either_side(sides):
    student, teacher = sides
    mirrored = [Span(span[2], span[3], span[0], span[1]) for span in align_spans(teacher, student)]
    assert align_spans(student, teacher) == mirrored


@given(tokenized())
def test_a_tokenization_aligns_with_itself_token_by_token(sides):
    spans = align_spans(sides[0], sides[0])
    assert spans
    assert all(span[1] - span[0] == 1 == span[3] - span[2] for span in spans)
