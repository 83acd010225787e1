"""Scores of a trajectory: refused values, masked tokens, and the columns."""

import re
from dataclasses import replace

import numpy as np
import pytest
from distillation_fakes import honest_scores

from rl_core.data.ragged import offsets_of
from rl_core.data.row_keys import RowKey
from rl_core.errors import TeacherError
from rl_distill.teacher.scores import (
    ScoreShape,
    TeacherRow,
    TeacherScores,
    check_scores,
    empty_scores,
    teacher_columns,
)

SHAPE = ScoreShape(top_k=2, vocab_size=8)
ROW = TeacherRow(
    key=RowKey("p0", 1, 2),
    input_ids=np.asarray([3, 5, 6, 7], np.int32),
    loss_mask=np.asarray([False, True, False, True]),
)
GOOD = TeacherScores(
    logprobs=np.log(np.asarray([[1, 1, 1], [0.25, 0.5, 0.25], [0.1, 0.5, 0.2], [0.125, 0.5, 0.25]], np.float32)),
    token_ids=np.asarray([[-1, -1, -1], [5, 0, 5], [6, 0, 1], [7, 0, 1]], np.int32),
)


def changed(place: tuple[int, int], *, logprob: float | None = None, token_id: int | None = None) -> TeacherScores:
    logprobs, ids = GOOD.logprobs.copy(), GOOD.token_ids.copy()
    if logprob is not None:
        logprobs[place] = logprob
    if token_id is not None:
        ids[place] = token_id
    return replace(GOOD, logprobs=logprobs, token_ids=ids)


def refusal(scores: TeacherScores, shape: ScoreShape = SHAPE) -> str:
    with pytest.raises(TeacherError) as caught:
        check_scores(scores, ROW, teacher="large", shape=shape)
    assert caught.value.teacher == "large"
    assert str(caught.value).startswith("teacher 'large' on prompt 'p0', session 1, output 2: ")
    return str(caught.value)


def test_good_scores_are_masked_where_nothing_trains() -> None:
    found = check_scores(GOOD, ROW, teacher="large", shape=SHAPE)
    assert found.token_ids.tolist() == [[-1, -1, -1], [5, 0, 5], [-1, -1, -1], [7, 0, 1]]
    np.testing.assert_allclose(np.exp(found.logprobs[[1, 3]]), [[0.25, 0.5, 0.25], [0.125, 0.5, 0.25]], rtol=1e-6)
    assert not found.logprobs[[0, 2]].any()
    assert (found.logprobs.dtype, found.token_ids.dtype) == (np.float32, np.int32)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (changed((1, 0), token_id=4), r"token 1 \(id 5\): expected the token's own id first; found 4.*other token ids"),
        (changed((3, 1), token_id=8), r"token 3 \(id 7\): expected token ids below 8.*found \[7 8 1\]"),
        (changed((3, 1), token_id=-2), "expected token ids below 8"),
        (changed((1, 2), logprob=np.nan), r"expected finite logprobs.*1 of 2 trained tokens"),
        (changed((1, 0), logprob=-np.inf), "expected finite logprobs"),
        (changed((1, 1), logprob=0.01), "expected logprobs <= 0"),
        (changed((3, 2), logprob=-0.1), "expected the most likely tokens in descending order"),
        (changed((1, 0), logprob=-3.0), "expected one logprob for the token"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_the_first_such_token(scores: TeacherScores, message: str) -> None:
    assert re.search(message, refusal(scores)), refusal(scores)


def test_probabilities_that_sum_above_one_are_refused() -> None:
    logprobs, ids = GOOD.logprobs.copy(), GOOD.token_ids.copy()
    logprobs[3] = np.log([0.125, 0.7, 0.7])
    assert "with a sum of at most 1; found 1.4" in refusal(replace(GOOD, logprobs=logprobs, token_ids=ids))


@pytest.mark.parametrize("name", ["logprobs", "token_ids"])
def test_scores_of_another_shape_are_refused(name: str) -> None:
    assert f"{name} must have shape [4, 3] for 4 tokens" in refusal(replace(GOOD, **{name: getattr(GOOD, name)[:, :2]}))


def test_hidden_states_are_checked_where_they_are_asked_for() -> None:
    shape = replace(SHAPE, hidden_size=5)
    assert "hidden must have shape [4, 5]" in refusal(GOOD, shape)
    assert "hidden must have shape none" in refusal(replace(GOOD, hidden=np.zeros((4, 5), np.float32)))
    states = np.ones((4, 5), np.float32)
    found = check_scores(replace(GOOD, hidden=states), ROW, teacher="large", shape=shape)
    assert found.hidden is not None
    assert found.hidden.sum(axis=1).tolist() == [0, 5, 0, 5]
    states[3, 1] = np.inf
    assert "expected finite hidden states" in refusal(replace(GOOD, hidden=states), shape)


def test_what_is_masked_may_be_anything() -> None:
    logprobs, ids = GOOD.logprobs.copy(), GOOD.token_ids.copy()
    logprobs[[0, 2]], ids[[0, 2]] = np.nan, 99
    found = check_scores(replace(GOOD, logprobs=logprobs, token_ids=ids), ROW, teacher="large", shape=SHAPE)
    assert np.isfinite(found.logprobs).all()


def test_noise_above_zero_is_cut_off_and_given_fewer_is_fine() -> None:
    noisy = changed((3, 1), logprob=5e-5)
    noisy = replace(noisy, logprobs=noisy.logprobs.copy(), token_ids=noisy.token_ids.copy())
    noisy.logprobs[3, 2], noisy.token_ids[3, 2] = 0, -1
    found = check_scores(noisy, ROW, teacher="large", shape=SHAPE)
    assert found.logprobs[3].max() == 0


def test_unlikely_ids_above_the_students_vocabulary_are_left_out_behind_the_others() -> None:
    logprobs, ids = GOOD.logprobs.copy(), GOOD.token_ids.copy()
    logprobs[3], ids[3] = np.log([0.125, 9e-4, 8e-4]), [7, 9, 1]
    found = check_scores(replace(GOOD, logprobs=logprobs, token_ids=ids), ROW, teacher="large", shape=SHAPE)
    assert found.token_ids[3].tolist() == [7, 1, -1]
    np.testing.assert_allclose(found.logprobs[3], [np.log(0.125), np.log(8e-4), 0], rtol=1e-6)


def test_columns_say_which_teacher_and_pad_hidden_states() -> None:
    rows = [ROW, replace(ROW, key=RowKey("p1", 0, 0), loss_mask=np.zeros(4, bool))]
    shape = replace(SHAPE, hidden_size=2)
    scores = [
        check_scores(replace(GOOD, hidden=np.ones((4, 2), np.float32)), ROW, teacher="large", shape=shape),
        empty_scores(rows[1], shape),
    ]
    columns = teacher_columns(scores, indices=[3, 4], offsets=offsets_of([4, 4]), hidden_size=3)
    assert columns["teacher_index"].values.tolist() == [-1, 3, -1, 3, -1, -1, -1, -1]
    assert columns["teacher_hidden"].values[:4].tolist() == [[0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]]
    assert columns["teacher_logprobs"].element_shape == (3,)


def test_the_fakes_of_other_tests_are_honest() -> None:
    row = replace(ROW, loss_mask=np.asarray([False, True, True, True]))
    for top_k in (0, 2, 8):
        scores, shape = honest_scores(row, top_k=top_k), ScoreShape(top_k=top_k, vocab_size=16)
        checked = check_scores(scores, row, teacher="fake", shape=shape)
        assert len(checked.ids if top_k else row.input_ids) == len(row.input_ids)
