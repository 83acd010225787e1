"""Stored texts of a teacher become trajectories."""

import numpy as np
import pytest

from rl_core import Batch, InProcessQueue, Prompt, TaskSpec
from rl_core.data.records import NO_VERSION
from rl_core.errors import DataError, SettingsError
from rl_distill.teacher.texts import TextOptions, count_texts, trajectories_from_texts

END = 9
OPTIONS = TextOptions(column="solution", end_token_id=END, max_response_tokens=4)


def encode(texts):
    return [[int(letter) for letter in text] for text in texts]


def prompt(uid, solution, *, ids=(7, 7)):
    return Prompt(uid=uid, input_ids=np.asarray(ids, dtype=np.int32), columns={"solution": solution, "level": 3})


def made(*prompts, options=OPTIONS):
    return trajectories_from_texts(prompts, options, encode=encode)


def test_a_text_follows_its_prompt_and_ends_with_the_end_token():
    (found,) = made(prompt("a", "12"))
    assert found.input_ids.tolist() == [7, 7, 1, 2, END]
    assert found.loss_mask.tolist() == [False, False, True, True, True]
    assert found.rollout_logprobs.tolist() == [0] * 5
    assert found.policy_versions.tolist() == [NO_VERSION] * 5
    assert (found.prompt_uid, found.session_index, found.output_index) == ("a", 0, 0)
    assert (found.finish_reason, found.reward) == ("stop", None)
    assert [getattr(found, name).dtype.name for name in ("input_ids", "loss_mask", "rollout_logprobs")] == [
        "int32",
        "bool",
        "float32",
    ]


def test_an_end_token_that_is_there_is_not_doubled():
    (found,) = made(prompt("a", "129"))
    assert found.input_ids.tolist() == [7, 7, 1, 2, END]


def test_several_texts_are_sessions_of_their_prompt():
    found = made(prompt("a", ["1", "2"]), prompt("b", "3"), prompt("c", ("4", "5", "6")))
    assert [(one.prompt_uid, one.session_index, int(one.input_ids[2])) for one in found] == [
        ("a", 0, 1),
        ("a", 1, 2),
        ("b", 0, 3),
        ("c", 0, 4),
        ("c", 1, 5),
        ("c", 2, 6),
    ]


def test_the_queue_takes_them():
    needs = frozenset({"input_ids", "loss_mask", "rollout_logprobs", "policy_versions"})
    queue = InProcessQueue([TaskSpec(name="train", needs=needs)])
    prompts = [prompt("a", ["1", "2"])]
    queue.issue(prompts, num_sessions=2)
    batch = Batch.from_trajectories(made(*prompts))
    queue.put_batch(batch.only(batch.names - {"reward"}))
    lease = queue.lease("train", groups=1, deadline_s=60)
    assert lease.batch.ragged("input_ids").values.tolist() == [7, 7, 1, END, 7, 7, 2, END]
    queue.close()


def test_a_text_that_is_too_long_is_an_error_or_dropped():
    prompts = [prompt("a", ["123", "1234", "12"]), prompt("b", "12345")]
    with pytest.raises(DataError, match=r"prompt 'a', column 'solution': the text '1234' has 5 tokens, more than .* 4"):
        made(*prompts)
    dropping = TextOptions(column="solution", end_token_id=END, max_response_tokens=4, overlong="drop")
    found = made(*prompts, options=dropping)
    assert [(one.prompt_uid, one.session_index) for one in found] == [("a", 0), ("a", 1)]
    assert count_texts(prompts, dropping, encode=encode) == (2, 2)
    with pytest.raises(DataError, match="all 1 texts in column 'solution' are longer"):
        count_texts(prompts[1:], dropping, encode=encode)


def test_texts_are_counted_over_many_prompts(monkeypatch):
    monkeypatch.setattr("rl_distill.teacher.texts.CHUNK_PROMPTS", 2)
    assert count_texts((prompt(f"p{n}", ["1", "2"]) for n in range(5)), OPTIONS, encode=encode) == (10, 0)


@pytest.mark.parametrize(
    ("solution", "words"),
    [
        (3, "must be a string, or a list of at least one; found 3"),
        (None, "found None"),
        ([], "found []"),
        (["1", None], "found ['1', None]"),
        ({"text": "1"}, "found {'text': '1'}"),
        ("", "has an empty text"),
        (["1", ""], "has an empty text"),
        ([["1"]], "found [['1']]"),
        ("1" * 99 + "\n", "the text '111"),
    ],
)
def test_what_is_no_text_is_refused(solution, words):
    with pytest.raises(DataError) as caught:
        trajectories_from_texts([prompt("a", solution)], OPTIONS, encode=lambda texts: [[1] * len(t) for t in texts])
    assert words in str(caught.value)
    assert "prompt 'a', column 'solution'" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_missing_column_is_named_with_those_that_are_there():
    options = TextOptions(column="answer", end_token_id=END, max_response_tokens=4)
    with pytest.raises(DataError, match=r"'answer', which prompt 'a' does not have; its columns: 'level', 'solution'"):
        made(prompt("a", "1"), options=options)


@pytest.mark.parametrize(("column", "most"), [("", 4), ("solution", 1)])
def test_impossible_options_are_refused(column, most):
    with pytest.raises(SettingsError, match=r"of TextOptions.* must be"):
        TextOptions(column=column, end_token_id=END, max_response_tokens=most)


def test_nothing_gives_nothing():
    assert made() == []
