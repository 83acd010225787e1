import pytest

from rl_core.errors import DataError
from rl_rollout.prompts.schema import read_problem

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?", "name": None}]


def test_rows_with_messages_are_read():
    row = {
        "prompt": MESSAGES,
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 7},
        "difficulty": 0.5,
    }
    problem = read_problem(row, where="f, row 1")
    assert problem.messages == (MESSAGES[0], {"role": "user", "content": "1+2?"})  # without keys that Arrow set to null
    assert (problem.text, problem.data_source, problem.ground_truth) == (None, "sums", "3")
    assert problem.columns == row


def test_rows_with_plain_text_are_read():
    problem = read_problem({"prompt": "1+2=", "answer": 3}, where="f, row 1")
    assert (problem.messages, problem.text, problem.data_source, problem.ground_truth) == ((), "1+2=", "default", 3)


def test_reward_model_goes_before_answer_and_a_falsy_answer_counts():
    row = {"prompt": "x", "answer": "long text", "reward_model": {"ground_truth": 0}}
    assert read_problem(row, where="f").ground_truth == 0
    assert read_problem({"prompt": "x", "answer": ""}, where="f").ground_truth == ""


def test_ground_truth_can_be_optional():
    assert read_problem({"prompt": "x"}, where="f", requires_ground_truth=False).ground_truth is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "x", "answer": "y"},
            r"f\.jsonl, line 4, field `prompt`: missing.*found the columns answer, question",
        ),
        ({"prompt": 3, "answer": "y"}, r"field `prompt`: expected a string or a list of messages, found int 3"),
        ({"prompt": "", "answer": "y"}, r"field `prompt`: expected text, found an empty string"),
        ({"prompt": [], "answer": "y"}, r"field `prompt`: expected at least one message"),
        ({"prompt": ["hi"], "answer": "y"}, r"field `prompt\[0\]`: expected an object with role and content"),
        (
            {"prompt": [{"role": "user"}], "answer": "y"},
            r"field `prompt\[0\]\.content`: expected a string, found nothing",
        ),
        ({"prompt": [MESSAGES[0], {"role": 1, "content": ""}], "answer": "y"}, r"field `prompt\[1\]\.role`: .* int 1"),
        ({"prompt": [{"role": "", "content": ""}], "answer": "y"}, r"field `prompt\[0\]\.role`: .*empty"),
        ({"prompt": "half \ud800", "answer": "y"}, r"field `prompt`: character 5 is half of a surrogate pair"),
        ({"prompt": "x"}, r"field `answer`: missing, and there is no `reward_model\.ground_truth`"),
        ({"prompt": "x", "reward_model": {}}, r"field `reward_model\.ground_truth`: missing"),
        ({"prompt": "x", "reward_model": "rule"}, r"field `reward_model`: expected an object, found str 'rule'"),
        ({"prompt": "x", "answer": "y", "data_source": 3}, r"field `data_source`: expected a non-empty string"),
    ],
)
def test_bad_rows_name_place_and_field(row, message):
    with pytest.raises(DataError, match=message) as caught:
        read_problem(row, where="f.jsonl, line 4")
    assert str(caught.value).startswith("f.jsonl, line 4, field `")


def test_digest_follows_prompt_source_and_ground_truth_alone():
    row = {"prompt": "x", "answer": "y"}
    digest = read_problem(row, where="f").digest()
    assert digest == "f39851d25d4a"  # pinned: uids must not change between versions
    assert read_problem({**row, "extra_info": 1}, where="g").digest() == digest
    for change in ({"prompt": "z"}, {"answer": "z"}, {"data_source": "z"}):
        assert read_problem({**row, **change}, where="f").digest() != digest
