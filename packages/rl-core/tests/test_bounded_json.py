"""The bounded JSON reader, compared with the json module."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_core.files import read_json
from rl_core.files.plain_files import count_values, load_json, preview

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
)


def number_of_values(value):
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(number_of_values, below))


@given(JSON)
def test_no_document_has_more_values_than_are_counted(value):
    raw = json.dumps(value).encode()
    assert count_values(raw) >= number_of_values(value)
    assert load_json(raw, max_values=count_values(raw)) == value
    with pytest.raises(ValueError, match="it may have"):
        load_json(raw, max_values=count_values(raw) - 1)


def test_what_is_shown_is_short_and_can_be_printed():
    assert preview("a\x1b[2J\udcff") == r"'a\x1b[2J\udcff'"
    assert len(preview("x" * 10**6)) == 80


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**70), 1e23, -0.0, 5e-324, "\ud800", "é\x00", {"a": [None, True, {"b": 0.1}]}, math.inf],
    ids=repr,
)
def test_values_are_those_of_json(value):
    raw = json.dumps([value, 1.0]).encode()
    assert repr(load_json(raw, max_values=10)) == repr([value, 1.0])


def test_nan_is_read():
    assert math.isnan(load_json(b"[NaN]", max_values=10)[0])


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"[1, 2, 3]", "may have 4 values; the limit is 3"),
        ('["é"]'.encode(), "ascii"),
        (b"[1", "Expecting ',' delimiter"),
    ],
)
def test_what_is_too_much_or_no_json_is_refused(raw, error):
    with pytest.raises(ValueError, match=error):
        load_json(raw, max_values=3)


def test_what_is_too_deep_is_refused():
    with pytest.raises(RecursionError):
        load_json(b"[" * 100_000 + b"]" * 100_000, max_values=1 << 20)


def test_the_place_of_a_mistake_in_a_file_is_told_once(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(DataError) as caught:
        read_json(file)
    assert str(caught.value) == f"{file} must be JSON (line 2, column 6: Expecting ':' delimiter)."
