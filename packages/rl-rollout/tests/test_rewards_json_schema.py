import asyncio
import builtins
import functools
import json

import numpy as np
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_rollout.rewards import RewardInput, RewardScorer, resolve_reward

pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "tags": {"type": "array"}},
    "required": ["name", "age"],
}


@functools.cache
def reward_of(**options):
    """Return a reward with one process, shared by all tests with the same options."""
    return resolve_reward("json_schema", {"num_workers": 1, "timeout_s": 60.0, **options})


def response(text, ground_truth=None, **columns):
    ids = np.array([1], np.int32)
    return RewardInput(prompt_uid="p", response_text=text, response_ids=ids, ground_truth=ground_truth, columns=columns)


@pytest.mark.parametrize(
    ("text", "reward", "parsed"),
    [
        ('{"name": "Ada", "age": 36}', 1.0, 1.0),
        (' {"name": "Ada", "age": 36, "more": null}\n', 1.0, 1.0),
        ('Here:\n```json\n{"name": "Ada", "age": 36}\n```\n', 1.0, 1.0),
        ('```\n{"name": "Ada", "age": -1}\n```', 0.0, 1.0),
        ('{"name": "Ada"}', 0.0, 1.0),
        ('{"name": "Ada", "age": 36', 0.0, 0.0),
        ("Ada is 36.", 0.0, 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0, 0.0),
        ("", 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        ('"' + "x" * (1 << 20) + '"', 0.0, 0.0),
    ],
)
def test_a_response_fits_the_schema_or_not(text, reward, parsed):
    result = reward_of()(response(text, SCHEMA))
    assert result.reward == reward
    assert result.components == {"parsed": parsed, "valid": reward, "timed_out": 0.0}
    assert ("schema_failure" in result.extras) == (reward == 0.0)


def test_where_the_schema_comes_from():
    text = '{"name": "Ada", "age": 36}'
    for ground_truth in (SCHEMA, json.dumps(SCHEMA), True):
        assert reward_of()(response(text, ground_truth)).reward == 1.0
    by_option = resolve_reward("json_schema", {"schema": SCHEMA})
    assert by_option(response(text)).reward == 1.0
    by_option.close()
    by_column = reward_of(column="schema")
    assert by_column(response(text, schema={"type": "array"})).reward == 0.0


def test_the_first_reason_says_where():
    result = reward_of()(response('{"name": "Ada", "age": -1}', SCHEMA))
    assert result.extras == {"schema_failure": "$.age: -1 is less than the minimum of 0"}


@pytest.mark.parametrize(
    ("text", "reward", "fitting"),
    [
        ('{"name": "Ada", "age": 36}', 1.0, 1.0),
        ('{"name": "Ada", "age": -1}', 0.5 + 0.5 * 2 / 3, 2 / 3),
        ('{"name": 1, "age": -1, "tags": 3}', 0.5, 0.0),
        ("[]", 0.5, 0.0),
        ("no", 0.0, 0.0),
    ],
)
def test_a_share_of_the_properties_counts_when_asked_for(text, reward, fitting):
    result = reward_of(is_fractional=True)(response(text, SCHEMA))
    assert result.reward == pytest.approx(reward)
    assert result.components["fitting"] == pytest.approx(fitting)


def test_what_fits_but_is_not_valid_is_less_than_1():
    schema = {**SCHEMA, "additionalProperties": False}
    assert reward_of(is_fractional=True)(response('{"name": "Ada", "age": 36, "more": 1}', schema)).reward == 0.99


@pytest.mark.parametrize(
    "ground_truth", [None, 3, "", "{", {"type": "strin"}, {"$ref": "http://127.0.0.1:9/none.json"}, {"$ref": "#/none"}]
)
def test_rows_without_a_schema_are_the_rows_fault(ground_truth):
    with pytest.raises(DataError, match=r"ground truth.*Repair the row"):
        reward_of()(response("{}", ground_truth))


def test_references_inside_the_schema_hold():
    schema = {"$defs": {"age": {"type": "integer"}}, "properties": {"age": {"$ref": "#/$defs/age"}}}
    reward = reward_of(is_fractional=True)
    assert [reward(response(text, schema)).reward for text in ('{"age": 1}', '{"age": "1"}')] == [1.0, 0.5]


def test_impossible_options_are_refused():
    with pytest.raises(SettingsError, match="not a valid JSON schema"):
        resolve_reward("json_schema", {"schema": {"type": "strin"}})
    with pytest.raises(SettingsError, match="accepts schema or column, not both"):
        resolve_reward("json_schema", {"schema": {}, "column": "x"})


@hypothesis_given(st.text())
def test_any_text_is_scored(text):
    assert reward_of()(response(text, SCHEMA)).reward in (0.0, 1.0)


def test_without_the_library_the_extra_is_named(monkeypatch):
    load = builtins.__import__

    def refuse(name, *given, **options):
        if name == "jsonschema":
            raise ImportError(name)
        return load(name, *given, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"Install rl-rollout\[json-schema\]"):
        resolve_reward("json_schema")


@pytest.mark.parametrize("number", ["1" * 4000, "1" + "0" * 400, "1e400", "1E1000000", "9" * 6001])
@pytest.mark.parametrize("multiple", [0.01, 1e-300, 7])
def test_a_number_that_no_rule_can_be_applied_to_is_wrong(number, multiple):
    assert reward_of()(response(number, {"multipleOf": multiple})).reward == 0.0


ENDLESS = {
    "pattern": ({"pattern": r"^(\w+\s?)*$"}, json.dumps("a" * 40 + "!")),
    "uniqueItems": ({"uniqueItems": True}, json.dumps([{"x": number} for number in range(50_000)])),
}


@pytest.mark.parametrize(("schema", "text"), ENDLESS.values(), ids=ENDLESS)
def test_a_response_that_takes_forever_to_check_is_wrong_and_harms_no_other(schema, text):
    reward = resolve_reward("json_schema", {"timeout_s": 1.0, "num_workers": 1})
    scorer = RewardScorer(reward)
    (hung,) = asyncio.run(scorer.score([response(text, schema)]))
    assert (hung.result.reward, hung.result.components["timed_out"]) == (0.0, 1.0)
    reward.close()
    slow = resolve_reward("json_schema", {"timeout_s": 60.0, "num_workers": 1})
    assert slow(response("3", schema)).reward == 1.0
    slow.close()
