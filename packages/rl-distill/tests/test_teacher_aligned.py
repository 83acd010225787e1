"""A teacher with another tokenizer: its inputs, and the positions of its scores."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.row_keys import RowKey
from rl_core.errors import SettingsError, ShapeError
from rl_distill.teacher.aligned import END, TeacherAligner, TokenPieces, read_pieces
from rl_distill.teacher.scores import TeacherRow, TeacherScores

EURO = "\u20ac".encode()
STUDENT = [END, b"dis", b"till", b"ation", b" works", b"5", b"+", EURO[:1], EURO[1:], b"x", b"x"]
TEACHER = [b"distill", b"at", b"ion", b" works", b"5", b"+", EURO, b"x", b"dis", END, b"\xef\xbf\xbd", b" 5", b"till"]
BEGIN = 50


def pieces(texts, *, begin_ids=()):
    return TokenPieces(
        pieces=dict(enumerate(texts)), end_ids=(texts.index(END),) if END in texts else (), begin_ids=begin_ids
    )


def encode(texts):
    """Encode texts greedily with the longest matching token; " 5" is a single token."""
    found = []
    for text in texts:
        rest, ids = text.encode(), []
        while rest:
            fits = [i for i, piece in enumerate(TEACHER) if isinstance(piece, bytes) and rest.startswith(piece)]
            ids.append(max(fits, key=lambda index: len(TEACHER[index])))
            rest = rest[len(TEACHER[ids[-1]]) :]
        found.append(ids)
    return found


def aligner(mode="sampled", *, teacher=None, write=encode, student=None):
    return TeacherAligner(student or pieces(STUDENT), teacher or pieces(TEACHER), write, mode=mode)


def row(ids, *, trained_from, masked=()):
    mask = np.arange(len(ids)) >= trained_from
    mask[list(masked)] = False
    return TeacherRow(key=RowKey("p", 0, 0), input_ids=np.asarray(ids, dtype=np.int32), loss_mask=mask)


def scores(logprobs, ids):
    return TeacherScores(logprobs=np.asarray(logprobs, dtype=np.float32), token_ids=np.asarray(ids, dtype=np.int32))


def test_the_teacher_gets_the_same_text_and_its_own_end_token():
    asked = aligner().to_teacher(row([5, 6, 1, 2, 3, 4, 0], trained_from=2))
    assert asked.row.input_ids.tolist() == [4, 5, 0, 1, 2, 3, 9]
    assert asked.row.loss_mask.tolist() == [False, False, True, True, True, True, True]
    assert asked.spans.tolist() == [[2, 4, 2, 3], [4, 5, 3, 5], [5, 6, 5, 6], [6, 7, 6, 7]]


def test_begin_tokens_stand_before_the_text_on_the_teachers_side_alone():
    with_begin = aligner(teacher=TokenPieces(pieces=pieces(TEACHER).pieces, end_ids=(9,), begin_ids=(BEGIN,)))
    asked = with_begin.to_teacher(row([5, 6], trained_from=1))
    assert asked.row.input_ids.tolist() == [BEGIN, 4, 5]
    assert asked.spans.tolist() == [[1, 2, 2, 3]]

    of_both = aligner(student=TokenPieces(pieces=dict(enumerate(STUDENT)), end_ids=(0,), begin_ids=(9,)))
    asked = of_both.to_teacher(row([9, 5, 6], trained_from=2))
    assert asked.row.input_ids.tolist() == [4, 5]
    assert asked.spans.tolist() == [[2, 3, 1, 2]]


def test_no_span_reaches_from_a_prompt_or_a_tools_words_into_a_response():
    asked = aligner().to_teacher(row([5, 1, 2, 1, 2], trained_from=2, masked=[3]))
    assert asked.row.input_ids.tolist() == [4, 8, 12, 8, 12]  # not "distill", which would cross the boundary
    assert asked.row.loss_mask.tolist() == [False, False, True, False, True]
    assert asked.spans.tolist() == [[2, 3, 2, 3], [4, 5, 4, 5]]


def test_the_first_token_of_all_has_no_teacher():
    asked = aligner().to_teacher(row([5, 6], trained_from=0))
    assert asked.spans.tolist() == [[1, 2, 1, 2]]


def test_a_span_of_the_sampled_mode_carries_its_log_ratio_in_equal_shares_by_hand():
    asked = aligner().to_teacher(row([5, 1, 2, 3], trained_from=1))
    assert asked.row.input_ids.tolist() == [4, 0, 1, 2]
    rollout = np.asarray([0, -1.0, -2.0, -4.0], dtype=np.float32)
    teacher = scores([[0], [-5.0], [-0.25], [-0.75]], [[-1], [0], [1], [2]])
    found = aligner().to_student(teacher, row([5, 1, 2, 3], trained_from=1), asked, rollout_logprobs=rollout)
    assert found.token_ids.tolist() == [[-1], [1], [2], [3]]
    assert found.logprobs[:, 0].tolist() == [0, -2.0, -3.0, -1.0]  # "distill": (-5 - -3) / 2 = -1 each; "ation": 3


def test_equal_tokens_get_the_teachers_own_logprob():
    asked = aligner().to_teacher(row([5, 6, 5], trained_from=1))
    teacher = scores([[0], [-0.5], [-1.5]], [[-1], [5], [4]])
    rollout = np.asarray([0, -7.0, -9.0], dtype=np.float32)
    found = aligner().to_student(teacher, row([5, 6, 5], trained_from=1), asked, rollout_logprobs=rollout)
    assert found.logprobs[:, 0].tolist() == [0, -0.5, -1.5]


def test_likeliest_tokens_are_mapped_by_text_and_unmapped_ones_dropped():
    by_top_k = aligner("top_k")
    own = row([5, 6, 1, 2, 0], trained_from=1)
    asked = by_top_k.to_teacher(own)
    assert asked.row.input_ids.tolist() == [4, 5, 0, 9]
    teacher = scores(
        [[0] * 4, [-2, -0.5, -1, -3], [-1, -1, -2, -3], [-0.1, -0.1, -3, -4]],
        [[-1] * 4, [5, 11, 4, 9], [0, 0, 4, 5], [9, 9, 7, 400]],
    )
    found = by_top_k.to_student(teacher, own, asked, rollout_logprobs=np.zeros(5, dtype=np.float32))
    assert found.token_ids.tolist() == [
        [-1] * 4,
        [6, 5, 0, -1],  # the student has "5" and the end, but no token " 5"
        [-1] * 4,  # the teacher has one token for "dis" and "till": no scores
        [-1] * 4,
        [0, 0, 9, -1],  # the first of the student's two "x" tokens
    ]
    assert found.logprobs[1].tolist() == [-2, -1, -3, 0]
    assert found.logprobs[2:4].tolist() == [[0] * 4] * 2
    assert found.logprobs[4].tolist() == pytest.approx([-0.1, -0.1, -3, 0])


def test_the_token_itself_is_among_the_likeliest_once_under_its_own_id():
    by_top_k = aligner("top_k")
    own = row([5, 10], trained_from=1)  # the second "x" token
    asked = by_top_k.to_teacher(own)
    teacher = scores([[0] * 3, [-0.3, -0.3, -2]], [[-1] * 3, [7, 7, 4]])
    found = by_top_k.to_student(teacher, own, asked, rollout_logprobs=np.zeros(2, dtype=np.float32))
    assert found.token_ids[1].tolist() == [10, 10, 5]


def test_sorted_probabilities_stand_at_the_first_token_of_a_span():
    by_rank = aligner("uld")
    own = row([5, 1, 2, 3], trained_from=1)
    asked = by_rank.to_teacher(own)
    teacher = scores([[0] * 3, [-1, -0.5, -1], [-2, -1, -2], [-3, -1, -3]], [[-1] * 3, [0, 3, 0], [1, 4, 1], [2, 4, 2]])
    found = by_rank.to_student(teacher, own, asked, rollout_logprobs=np.zeros(4, dtype=np.float32))
    assert found.token_ids.tolist() == [[-1] * 3, [1, 3, 0], [-1] * 3, [3, 4, 1]]
    assert found.logprobs.tolist() == [[0] * 3, [-1, -0.5, -1], [0] * 3, [-2, -1, -2]]


def test_a_character_cut_in_tokens_is_one_span_and_what_is_no_text_has_no_teacher():
    whole = row([5, 7, 8, 6], trained_from=1)
    assert aligner().to_teacher(whole).spans.tolist() == [[1, 3, 1, 2], [3, 4, 2, 3]]
    cut = row([5, 6, 7], trained_from=1)  # ended by the length limit within a character
    asked = aligner().to_teacher(cut)
    assert asked.row.input_ids.tolist() == [4, 5, 10]
    assert asked.spans.tolist() == [[1, 2, 1, 2]]
    assert asked.row.loss_mask.tolist() == [False, True, False]


def test_a_token_of_no_tokenizer_has_no_teacher():
    asked = aligner().to_teacher(row([5, 6, 31, 0, 6], trained_from=1))
    assert asked.row.input_ids.tolist() == [4, 5, 9, 5]
    assert asked.spans.tolist() == [[3, 4, 2, 3], [4, 5, 3, 4]]  # the token before the unknown one has no teacher


def test_a_space_before_every_text_is_taken_off():
    spaced = aligner(write=lambda texts: [[11, 5] if text == "5+" else encode([text])[0] for text in texts])
    asked = spaced.to_teacher(row([9, 5, 6], trained_from=1))
    assert asked.row.input_ids.tolist() == [7, 11, 5]
    assert asked.spans.tolist() == [[1, 2, 1, 2], [2, 3, 2, 3]]


def test_a_tokenizer_that_rewrites_text_gives_nothing_and_says_nothing_wrong():
    rewriting = aligner(write=lambda texts: [[7] for _ in texts])
    asked = rewriting.to_teacher(row([5, 6, 0], trained_from=1))
    assert asked.row.input_ids.tolist() == [7, 7, 9]
    assert asked.spans.tolist() == [[2, 3, 2, 3]]  # only the end token


def test_scores_of_another_row_are_refused():
    own = row([5, 6], trained_from=1)
    asked = aligner().to_teacher(own)
    with pytest.raises(ShapeError, match="2 rows, one per translated token"):
        aligner().to_student(scores([[0.0]], [[4]]), own, asked, rollout_logprobs=np.zeros(2, dtype=np.float32))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=20), st.integers(1, 5), st.randoms(use_true_random=False))
def test_log_ratios_of_all_spans_are_kept(ids, trained_from, random):
    own = row(ids, trained_from=trained_from)
    asked = aligner().to_teacher(own)
    rollout = np.asarray([-random.random() for _ in ids], dtype=np.float32)
    logprobs = [[-random.random()] for _ in asked.row.input_ids]
    teacher = scores(logprobs, asked.row.input_ids[:, None])
    found = aligner().to_student(teacher, own, asked, rollout_logprobs=rollout)
    has_teacher = found.token_ids[:, 0] >= 0
    assert not (has_teacher & ~own.loss_mask).any()
    assert (found.token_ids[has_teacher, 0] == own.input_ids[has_teacher]).all()
    assert (found.logprobs[~has_teacher] == 0).all()
    expected = math.fsum(value[0] for value, is_asked in zip(logprobs, asked.row.loss_mask, strict=True) if is_asked)
    assert found.logprobs[has_teacher, 0].sum() == pytest.approx(expected, abs=1e-5)


def test_pieces_of_a_folder_are_bytes_by_its_decoder(tmp_path):
    model = {"vocab": {"\u0120a": 0, "\u00e2\u0124\u00ac": 1, "<end>": 2}}
    document = {"model": model, "added_tokens": [{"id": 2, "content": "<end>"}, {"id": 3, "content": "\u0120"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | {"decoder": {"type": "ByteLevel"}}))
    found = read_pieces(tmp_path, end_ids=[2])
    assert found.pieces == {0: b" a", 1: EURO, 2: END, 3: "\u0120".encode()}

    model = {"vocab": [["\u2581a", -1], ["<0xE2>", -2]]}
    decoders = [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    document = {"model": model, "decoder": {"type": "Sequence", "decoders": decoders}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert read_pieces(tmp_path, end_ids=[]).pieces == {0: b" a", 1: b"\xe2"}

    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "decoder": {"type": "WordPiece"}}))
    with pytest.raises(SettingsError, match=r"its decoder must be .* found WordPiece"):
        read_pieces(tmp_path, end_ids=[])
