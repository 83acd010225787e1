import json
import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_metrics.reductions.histogram import ACCURACY, BIN_LIMIT, CHUNK, MAPPING, MAX_COUNT, Histogram, _keys

FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-10, 10),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, 5e-324, sys.float_info.min, sys.float_info.max, -sys.float_info.max]),
)


def of(*values):
    histogram = Histogram()
    histogram.add(values)
    return histogram


def text(histogram):
    return json.dumps(histogram.to_json(), allow_nan=False)


def test_numbers_that_can_be_worked_out():
    histogram = of(0.0, 1.0, 1.0, -3.0, 0.5, 0.0)
    assert (histogram.count, histogram.num_nonfinite) == (6, 0)
    assert (histogram.sum, histogram.mean) == (-0.5, -0.5 / 6)
    assert (histogram.min, histogram.max) == (-3.0, 1.0)
    assert [histogram.quantile(q) for q in (0, 0.2, 0.4, 1)] == [-3.0, 0.0, 0.0, 1.0]
    assert histogram.quantile(0.6) == pytest.approx(0.5, rel=ACCURACY)
    assert histogram.quantile(0.8) == pytest.approx(1.0, rel=ACCURACY)


@pytest.mark.parametrize(
    "values",
    [[0.0, 1.0, 0.0, 1.0, 1.0], [7.3] * 5, [-0.3, 0.0, 0.0, -0.3], [0.1, 5.0, 5.0], [1e-12, 3.3, 3.3, 3.3]],
)
def test_quantiles_are_exact_where_the_sum_leaves_no_doubt(values):
    quantiles = [of(*values).quantile(rank / (len(values) - 1) + 1e-9 * (rank + 1 < len(values)))
                 for rank in range(len(values))]  # fmt: skip
    assert quantiles == sorted(values)


@given(st.lists(FLOATS, min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_lie_between_the_least_and_the_largest_value(values, q):
    assert min(values) <= of(*values).quantile(q) <= max(values)
    assert of(*values[:1] * 5).quantile(q) == values[0]


def test_the_json_is_compact_and_exact():
    assert of(1.0, 1.0, -0.5, 0.0, math.nan).to_json() == {
        "accuracy": 0.02,
        "count": 4,
        "sum": "0x3p-1",
        "min": -0.5,
        "max": 1.0,
        "nonfinite": 1,
        "zeros": 1,
        "positive": [[0], [2]],
        "negative": [[-17], [1]],
    }


def test_an_empty_one():
    histogram = of()
    assert (histogram.count, histogram.sum) == (0, 0.0)
    assert all(math.isnan(x) for x in (histogram.mean, histogram.min, histogram.max, histogram.quantile(0.5)))
    edges, counts = histogram.bins()
    assert (len(edges), len(counts)) == (0, 0)
    assert text(Histogram.from_json(histogram.to_json())) == text(histogram)


@given(
    st.lists(st.one_of(FLOATS, st.sampled_from([math.nan, math.inf, -math.inf])), max_size=40),
    st.lists(st.integers(0, 3), min_size=40, max_size=40),
    st.randoms(use_true_random=False),
)
def test_any_split_gives_the_same_bits(values, ranks, random):
    whole = of(*values)
    parts = [of(*(v for v, rank in zip(values, ranks, strict=False) if rank == r)) for r in range(4)]
    random.shuffle(parts)
    merged = Histogram()
    for part in parts:
        merged.merge(Histogram.from_json(json.loads(text(part))) if random.random() < 0.5 else part)
    assert text(merged) == text(whole)
    one_by_one = Histogram()
    for value in random.sample(values, len(values)):
        one_by_one.add(value)
    assert text(one_by_one) == text(whole)
    assert text(Histogram.from_json(json.loads(text(whole)))) == text(whole)


@given(st.lists(FLOATS, min_size=1, max_size=30), st.floats(0, 1))
def test_statistics_are_exact_and_quantiles_within_the_accuracy(values, q):
    histogram = of(*values)
    exact = sum(map(Fraction, values))
    assert histogram.mean == float(exact / len(values))
    try:
        assert histogram.sum == float(exact)
    except OverflowError:
        assert histogram.sum == (math.inf if exact > 0 else -math.inf)
    assert (histogram.min, histogram.max) == (min(values), max(values))
    value = sorted(values)[math.floor(q * (len(values) - 1))]
    largest = max(map(abs, values))
    if abs(value) > max(largest * 1e-17, MAPPING.min_possible):  # smaller values may share the lowest bucket
        assert histogram.quantile(q) == pytest.approx(value, rel=ACCURACY * 1.001, abs=0)
    else:
        assert abs(histogram.quantile(q)) <= max(largest * 1e-17, MAPPING.min_possible) * (1 + ACCURACY)


@given(st.lists(FLOATS, max_size=30), st.integers(1, 40))
def test_bins_hold_every_value_between_rising_edges(values, limit):
    edges, counts = of(*values).bins(limit)
    assert counts.sum() == len(values)
    assert len(counts) <= limit
    if values:
        assert (np.diff(edges) > 0).all()
        assert edges[0] <= min(values)
        assert edges[-1] >= max(values)


def test_bins_are_as_numpys_where_buckets_are_narrow():
    edges, counts = of(0.0, 1.0, 1.0, 0.0, 0.0, 0.4).bins(4)
    assert edges.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert counts.tolist() == [3, 1, 0, 2]
    edges, counts = of(7.0, 7.0).bins(2)
    assert (edges.tolist(), counts.tolist()) == ([6.5, 7.0, 7.5], [0, 2])


def test_no_edge_lies_within_a_bucket():
    edges, counts = of(*np.linspace(900, 1100, 1000)).bins(50)
    assert 5 <= len(counts) <= 7
    assert counts.sum() == 1000
    truth, _ = np.histogram(np.linspace(900, 1100, 1000), edges)
    assert np.abs(truth - counts).max() <= 1


@given(st.lists(st.floats(MAPPING.min_possible, exclude_min=True, allow_infinity=False), min_size=1, max_size=20))
def test_keys_are_the_librarys(values):
    assert _keys(*np.frexp(np.asarray(values))).tolist() == [MAPPING.key(value) for value in values]


def test_many_values_take_no_more_memory():
    random = np.random.default_rng(0)
    histogram = Histogram()
    for scale in (1e-200, 1.0, 1e-30, 1e200, 1e100):
        histogram.add(random.normal(size=3 * CHUNK + 1) * scale)
    state = histogram.to_json()
    assert histogram.count == 5 * (3 * CHUNK + 1)
    assert all(0 < len(state[sign][0]) <= BIN_LIMIT for sign in ("positive", "negative"))
    assert histogram.quantile(0.999) > 1e200


def test_weights_are_how_many_values_each_stands_for():
    weighted, repeated = Histogram(), of(*[0.1] * 3, *[-2.0] * 5, 0.0, math.nan, math.nan)
    weighted.add([0.1, -2.0, 0.0, math.nan, 7.0], weights=[3, 5, 1, 2, 0])
    assert text(weighted) == text(repeated)
    weighted.add(1.0, weights=MAX_COUNT - 9)
    assert weighted.count == MAX_COUNT
    with pytest.raises(DataError, match="can hold 9007199254740992 values"):
        weighted.add(1.0)
    with pytest.raises(DataError, match="can hold 9007199254740992 values"):
        weighted.merge(of(1.0))


@pytest.mark.parametrize("weights", [[0.5], [-1], [math.nan], [1, 1], ["x"], [2**60]])
def test_other_weights_are_refused(weights):
    histogram = Histogram()
    with pytest.raises(DataError):
        histogram.add([1.0], weights=weights)
    assert histogram.count == 0


@pytest.mark.parametrize("values", ["a", [1.0, "b"], [[1.0], [1.0, 2.0]], {"a": 1}, object()])
def test_what_is_no_number_is_refused(values):
    with pytest.raises(DataError, match="counts numbers"):
        Histogram().add(values)


def test_arrays_of_any_shape_and_type():
    histogram = Histogram()
    histogram.add(np.arange(6, dtype=np.int8).reshape(2, 3))
    histogram.add(np.asarray([True, False]))
    histogram.add(np.float32(0.1))
    assert (histogram.count, histogram.sum) == (9, 16.0 + float(np.float32(0.1)))


def test_a_quantile_outside_is_refused():
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(DataError, match=r"in \[0, 1\]"):
            of(1.0).quantile(q)


@pytest.mark.parametrize(
    "changed",
    [
        {"accuracy": 0.01},
        {"accuracy": True},
        {"count": 4},
        {"count": 10**400},
        {"sum": "1"},
        {"sum": None},
        {"sum": "0x1p-9999"},
        {"sum": "0x1p9999"},
        {"sum": "0x" + "f" * 10_000 + "p0"},
        {"min": None},
        {"min": "0"},
        {"min": 2.0},
        {"min": 10**400},
        {"max": math.inf},
        {"max": math.nan},
        {"nonfinite": -1},
        {"zeros": 1.0},
        {"zeros": True},
        {"zeros": 2**60},
        {"positive": [[0], [-2]]},
        {"positive": [[0], [0]]},
        {"positive": [[0.0], [2]]},
        {"positive": [[0], [1, 1]]},
        {"positive": [[1, 0], [1, 1]]},
        {"positive": [[0, 0], [1, 1]]},
        {"positive": [[10**9], [2]]},
        {"positive": [[-(10**9)], [2]]},
        {"positive": [[10**400], [2]]},
        {"positive": [list(range(2000)), [1] * 2000]},
        {"positive": "ab"},
        {"positive": {"0": 2}},
        {"positive": None},
        {"positive": [[0], {"0": 2}]},
        {"negative": [["x"], [1]]},
        {"negative": []},
    ],
)
def test_hostile_json_is_refused(changed):
    state = of(1.0, 1.0, 0.0).to_json()
    with pytest.raises(DataError, match=r"an object of Histogram\.to_json"):
        Histogram.from_json(state | changed)


@pytest.mark.parametrize("state", [None, [], "x", 3, {}, {"accuracy": 0.02}])
def test_what_is_no_histogram_is_refused(state):
    with pytest.raises(DataError):
        Histogram.from_json(state)


def test_a_lying_but_well_formed_one_still_draws():
    state = of(1.0, 2.0).to_json() | {"min": -1e308, "max": 1e308}
    edges, counts = Histogram.from_json(state).bins(5)
    assert counts.sum() == 2
    assert np.isfinite(edges).all()
