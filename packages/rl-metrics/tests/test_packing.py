import gzip
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from read_report import unpack

from rl_metrics.report.packing import pack, rounded

TEXTS = st.text(alphabet=st.characters())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, JSON, max_size=4))
def test_a_header_comes_back(header):
    assert unpack(pack(header, {}))[0] == header


def test_texts_that_are_none_come_back():
    texts = {"lone": "\ud800", "nul": "\0", "end": "</script>", "order": "\u202e"}
    assert unpack(pack(texts, {}))[0] == texts


def test_numbers_that_json_lacks_are_null():
    assert unpack(pack({"a": [math.nan, math.inf, {"b": -math.inf}], "c": (1, 2.5)}, {}))[0] == {
        "a": [None, None, {"b": None}],
        "c": [1, 2.5],
    }


def test_columns_come_back():
    columns = {
        "whole": ("i32", [-(2**31), 0, 7, 2**31 - 1]),
        "bytes": ("u8", [0, 1, 255]),
        "exact": ("f64", [0.1, -1e300]),
        "half": ("f32", [0.5, -2.25, 0.0]),
        "empty": ("f32", []),
    }
    header, read = unpack(pack({}, columns))
    assert header == {}
    assert {name: values.tolist() for name, values in read.items()} == {name: of for name, (_, of) in columns.items()}


def test_what_a_whole_number_cannot_hold_is_the_nearest():
    _, columns = unpack(pack({}, {"a": ("i32", [2**40, -(2**40), math.nan]), "b": ("u8", [-1, 300])}))
    assert columns["a"].tolist() == [2**31 - 1, -(2**31), 0]
    assert columns["b"].tolist() == [0, 255]


@given(st.floats(-1e30, 1e30))
def test_about_four_digits_stay(value):
    (near,) = unpack(pack({}, {"a": ("f32", [value])}))[1]["a"].tolist()
    assert near == pytest.approx(value, rel=2**-13, abs=1e-36)


def test_the_rounding_is_to_the_nearest():
    assert rounded(np.array([1 + 2**-14 + 2**-20, 1 + 2**-14 - 2**-20, -0.0], np.float32)).tolist() == [
        1 + 2**-13,
        1,
        0,
    ]


@pytest.mark.parametrize("kind", [[], [2.0**24 + 1], [1e300]])
def test_what_is_not_finite_is_unknown(kind):
    values = unpack(pack({}, {"a": ("f32", [math.nan, math.inf, -math.inf, *kind])}))[1]["a"]
    assert np.isnan(values[:3]).all()
    assert values[3:].tolist() == kind


@given(st.lists(st.integers(-(2**53), 2**53) | st.floats(allow_infinity=False)))
def test_whole_numbers_stay_as_they_are_beside_others(values):
    near = unpack(pack({}, {"a": ("f32", values)}))[1]["a"].tolist()
    assert [kept for kept, value in zip(near, values, strict=True) if isinstance(value, int)] == [
        value for value in values if isinstance(value, int)
    ]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.floats(8000, 9000), min_size=2))
def test_the_rounding_keeps_the_order(values):
    assert (np.diff(rounded(np.array(sorted(values)))) >= 0).all()


def test_what_float32_holds_takes_no_more():
    assert len(gzip.decompress(pack({}, {"a": ("f32", [0.1] * 1000 + [2.0**24])}))) < 4100


def test_the_same_input_gives_the_same_bytes():
    columns = {"a": ("f32", np.arange(1000))}
    assert pack({"a": 1}, columns) == pack({"a": 1}, columns)


def test_the_layout_that_the_page_reads():
    # uint32 length, JSON, then the first bytes of all numbers, their second bytes, ...
    content = gzip.decompress(pack({}, {"a": ("i32", [1, 258])}))
    assert content[4 + content[0] :] == bytes([1, 2, 0, 1, 0, 0, 0, 0])
