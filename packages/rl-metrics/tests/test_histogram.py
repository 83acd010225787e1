import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_metrics.reductions.histogram import ACCURACY, CENTERS, EDGES, NUM_KEYS, Histogram

LEAST, MOST = CENTERS[NUM_KEYS + 1], CENTERS[-1]
FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-10, 10),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, 5e-324, sys.float_info.min, sys.float_info.max, -sys.float_info.max]),
    st.sampled_from(EDGES[NUM_KEYS - 10 : NUM_KEYS + 10].tolist() + EDGES[2 * NUM_KEYS - 10 : -1].tolist()),
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
    assert [histogram.quantile(q) for q in (0.6, 0.8)] == [0.5, 1.0]


def test_whole_numbers_up_to_64_and_their_fractions_have_no_error():
    for value in [*range(-64, 65), 31.5, -15.75, 0.5, 2.0**-63, 2.0**127]:
        histogram = of(-1e38, value, 2e38)
        assert histogram.quantile(0.5) == value
        assert of(value, value).mean == value


@given(st.lists(FLOATS, min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_lie_between_the_least_and_the_largest_value(values, q):
    assert min(values) <= of(*values).quantile(q) <= max(values)
    assert of(*values[:1] * 5).quantile(q) == values[0]


def test_the_json_is_compact_and_exact():
    assert of(1.0, 1.0, -0.5, 0.0, math.nan).to_json() == {
        "per_octave": 32,
        "count": 4,
        "min": -0.5,
        "max": 1.0,
        "nonfinite": 1,
        "keys": [-2017, 0, 2049],
        "counts": [1, 1, 2],
    }


def test_an_empty_histogram_has_no_bins():
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


def test_the_accuracy_is_as_documented():
    assert ACCURACY == 1 / 64


@given(st.lists(FLOATS, min_size=1, max_size=30), st.sampled_from([0.0, 1.0]) | st.floats(0, 1))
def test_extremes_are_exact_and_quantiles_within_the_accuracy(values, q):
    histogram = of(*values)
    assert (histogram.count, histogram.min, histogram.max) == (len(values), min(values), max(values))
    assert (histogram.quantile(0), histogram.quantile(1)) == (min(values), max(values))
    value = sorted(values)[math.floor(q * (len(values) - 1))]
    if LEAST <= abs(value) <= MOST:
        assert histogram.quantile(q) == pytest.approx(value, rel=ACCURACY, abs=0)
    elif abs(value) < LEAST:
        assert abs(histogram.quantile(q)) <= LEAST
    else:
        assert abs(histogram.quantile(q)) >= MOST * (1 - ACCURACY)


@given(st.lists(st.floats(LEAST, MOST), min_size=1, max_size=30))
def test_sums_of_values_of_one_sign_are_within_the_accuracy(values):
    assert of(*values).sum == pytest.approx(math.fsum(values), rel=ACCURACY)
    assert of(*values).mean == pytest.approx(math.fsum(values) / len(values), rel=ACCURACY)


@given(FLOATS)
def test_a_value_counts_between_the_edges_of_its_bucket(value):
    (key,) = of(value).to_json()["keys"]
    assert EDGES[key + NUM_KEYS] <= value <= EDGES[key + NUM_KEYS + 1]


@given(st.lists(FLOATS, max_size=30), st.integers(1, 40))
def test_bins_hold_every_value_between_rising_edges(values, limit):
    edges, counts = of(*values).bins(limit)
    assert counts.sum() == len(values)
    assert len(counts) == max(len(edges) - 1, 0) <= limit
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


def test_a_largest_value_between_two_buckets_counts_in_the_last_bin():
    between = float(EDGES[NUM_KEYS + 2016])
    edges, counts = of(0.25, 0.25, between).bins(3)
    assert edges[-1] == between
    assert counts.tolist() == [2, *[0] * (len(counts) - 2), 1]


def test_no_edge_lies_within_a_bucket():
    edges, counts = of(*np.linspace(900, 1100, 1000)).bins(50)
    assert 8 <= len(counts) <= 12
    assert counts.sum() == 1000
    truth, _ = np.histogram(np.linspace(900, 1100, 1000), edges)
    assert np.abs(truth - counts).max() <= 1


def test_many_values_take_no_more_memory():
    random = np.random.default_rng(0)
    histogram = Histogram()
    for scale in (1e-200, 1.0, 1e-30, 1e200, 1e100):
        histogram.add(random.normal(size=30_000) * scale)
    assert histogram.count == 150_000
    assert len(text(histogram)) < 60_000
    assert histogram.quantile(0.999) > 1e38


@pytest.mark.parametrize("values", ["a", [1.0, "b"], [[1.0], [1.0, 2.0]], {"a": 1}, object()])
def test_what_is_no_number_is_refused(values):
    with pytest.raises(DataError, match="counts numbers"):
        Histogram().add(values)


def test_arrays_of_any_shape_and_type_are_added():
    histogram = Histogram()
    histogram.add(np.arange(6, dtype=np.int8).reshape(2, 3))
    histogram.add(np.asarray([True, False]))
    histogram.add(np.float32(0.1))
    assert histogram.count == 9
    assert histogram.sum == pytest.approx(16.1, rel=ACCURACY)


def test_a_quantile_outside_is_refused():
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(DataError, match=r"in \[0, 1\]"):
            of(1.0).quantile(q)


@pytest.mark.parametrize(
    "changed",
    [
        {"per_octave": 16},
        {"min": "0"},
        {"min": 10**400},
        {"nonfinite": True},
        {"counts": [1.0, 2]},
        {"counts": [1, 10**400]},
        {"counts": [True, 2]},
        {"keys": [0, 2.0]},
        {"keys": [0, 10**9]},
        {"keys": [-(10**9), 0]},
        {"keys": [0, 10**400]},
        {"keys": list(range(2000)), "counts": [1] * 1999},
        {"keys": "ab"},
        {"keys": {"0": 2}},
        {"keys": None},
        {"keys": ["x", 1]},
    ],
)
def test_json_of_another_form_is_refused(changed):
    state = of(1.0, 1.0, 0.0).to_json()
    with pytest.raises(DataError, match=r"an object of Histogram\.to_json"):
        Histogram.from_json(state | changed)


@pytest.mark.parametrize("state", [None, [], "x", 3, {}, {"per_octave": 32}])
def test_what_is_no_histogram_is_refused(state):
    with pytest.raises(DataError, match=r"an object of Histogram\.to_json"):
        Histogram.from_json(state)
