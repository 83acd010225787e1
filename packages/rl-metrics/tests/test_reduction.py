import itertools
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_metrics.definitions.definition import Metric, MetricTable
from rl_metrics.reductions.recorder import Recorder

TABLE = MetricTable(
    Metric(name=name, unit="1", reduction=name, meaning="A test.")
    for name in ("mean", "sum", "min", "max", "last", "histogram")
)

values = st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e30, max_value=1e30)
weights = st.one_of(st.integers(0, 10_000).map(float), st.floats(0, 1e6))


def recorder():
    return Recorder(definitions=TABLE, strict=True)


def test_reductions_equal_hand_computed_ones():
    record = recorder()
    for value, weight in ((1.0, 3.0), (2.0, 1.0), (10.0, 0.0)):
        for name in ("mean", "sum", "min", "max", "last"):
            record.record(name, value, weight=weight)
    assert record.reduce() == {"mean": 1.25, "sum": 3.0, "min": 1.0, "max": 2.0, "last": 2.0}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(values, weights, st.integers(0, 3)), min_size=1, max_size=25),
    st.sampled_from(["mean", "sum", "min", "max"]),
    st.randoms(use_true_random=False),
)
def test_any_split_over_ranks_and_any_order_gives_the_same_bits(rows, name, random):
    whole = recorder()
    ranks = [recorder() for _ in range(4)]
    for value, weight, _ in rows:
        whole.record(name, value, weight=weight)
    shuffled = rows.copy()
    random.shuffle(shuffled)
    for value, weight, rank in shuffled:
        ranks[rank].record(name, value, weight=weight)
    merged = recorder()
    for rank in ranks:
        merged.merge(pickle.loads(pickle.dumps(rank)))
    assert merged.reduce() == whole.reduce()


ANY = st.one_of(values, st.sampled_from([math.nan, math.inf, -math.inf]))


def same(reduced):
    """Return reduced values as text, so that NaN equals NaN, and 0 equals -0."""
    return {name: repr(value + 0.0) for name, value in reduced.items()}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ANY, weights, st.integers(0, 2), st.integers(0, 2)), max_size=25))
def test_any_split_over_ranks_and_micro_batches_gives_the_same_with_what_is_not_finite(rows):
    whole = recorder()
    ranks = [[recorder() for _ in range(3)] for _ in range(3)]
    for value, weight, rank, micro_batch in rows:
        for name in ("mean", "sum", "min", "max"):
            whole.record(name, value, weight=weight)
            ranks[rank][micro_batch].record(name, value, weight=weight)
    merged = recorder()
    for micro_batches in reversed(ranks):
        of_rank = recorder()
        for micro_batch in reversed(micro_batches):
            of_rank.merge(micro_batch)
        merged.merge(of_rank)
    assert same(merged.reduce()) == same(whole.reduce())


@settings(max_examples=40, deadline=None)
@given(st.lists(ANY, max_size=12), st.lists(st.integers(0, 12), max_size=3))
def test_last_is_the_newest_finite_one_however_the_values_were_cut(given_values, cuts):
    edges = [0, *sorted(min(cut, len(given_values)) for cut in cuts), len(given_values)]
    merged = recorder()
    for start, stop in itertools.pairwise(edges):
        part = recorder()
        for value in given_values[start:stop]:
            part.record("last", value)
        merged.merge(part)
    finite = [value for value in given_values if math.isfinite(value)]
    if finite:
        assert merged.reduce()["last"] == finite[-1]
    assert merged.reduce().get("nonfinite/last", 0.0) == len(given_values) - len(finite)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(values, weights), min_size=1, max_size=25).filter(lambda rows: any(w for _, w in rows)))
def test_a_mean_is_the_correctly_rounded_one(rows):
    record = recorder()
    for value, weight in rows:
        record.record("mean", value, weight=weight)
    total = sum((Fraction(value) * Fraction(weight) for value, weight in rows), Fraction())
    assert record.reduce() == {"mean": float(total / sum(Fraction(weight) for _, weight in rows))}


def test_small_values_survive_beside_huge_ones():
    record = recorder()
    for value in (1e30, 1.0, -1e30):
        record.record("sum", value)
    assert record.reduce() == {"sum": 1.0}


@pytest.mark.parametrize("name", ["mean", "sum", "min", "max", "last"])
def test_nan_and_infinity_are_counted_and_left_out(name):
    record = recorder()
    for value in (math.nan, 2.0, math.inf, -math.inf):
        record.record(name, value)
    with structlog.testing.capture_logs() as logs:
        reduced = record.reduce()
    assert reduced == {name: 2.0, f"nonfinite/{name}": 3.0}
    assert logs == [{"event": "nonfinite_metrics", "log_level": "warning", "counts": {name: 3.0}}]


@pytest.mark.parametrize("name", ["mean", "sum", "max", "last"])
def test_a_metric_of_nothing_but_nan_is_nan(name):
    record = recorder()
    record.record(name, math.nan)
    reduced = record.reduce()
    assert math.isnan(reduced[name])
    assert reduced[f"nonfinite/{name}"] == 1.0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_result_beyond_every_float_is_not_finite_and_loses_no_other(sign):
    step = recorder()
    step.record_all({"sum": sign * 1.7e308, "max": 1.7e308})
    step.record_all({"sum": sign * 1.7e308, "max": 2.0})
    reduced = step.reduce()
    assert math.isnan(reduced.pop("sum"))
    assert reduced == {"max": 1.7e308, "nonfinite/sum": 1.0}


def test_nonfinite_counts_are_merged():
    first, second = recorder(), recorder()
    first.record("mean", math.nan)
    second.record("mean", math.nan)
    second.record("mean", 4.0)
    first.merge(second)
    assert first.reduce() == {"mean": 4.0, "nonfinite/mean": 2.0}


def test_the_mean_of_nothing_does_not_count():
    record = recorder()
    record.record("mean", math.nan, weight=0)
    assert record.reduce() == {}
    record.record("mean", 3.0, weight=2)
    assert record.reduce() == {"mean": 3.0}


def test_last_is_the_newest_also_over_a_merge():
    first, second = recorder(), recorder()
    first.record("last", 1.0)
    second.record("last", 2.0)
    second.record("last", 3.0)
    first.merge(second)
    first.merge(recorder())
    assert first.reduce() == {"last": 3.0}


def test_a_merge_leaves_the_other_alone():
    first, second = recorder(), recorder()
    second.record("mean", 2.0)
    first.merge(second)
    first.record("mean", 4.0)
    assert second.reduce() == {"mean": 2.0}
    assert first.reduce() == {"mean": 3.0}


class Scalar:
    """A tensor-like value that supports only float()."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value


def test_a_scalar_is_a_number_whatever_its_type():
    record = recorder()
    record.record("mean", Scalar(3.0), weight=Scalar(2.0))
    record.record("mean", Scalar(9.0))
    assert record.reduce() == {"mean": 5.0}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_impossible_weights_are_refused(weight):
    with pytest.raises(DataError, match="weight of mean must be finite and at least 0"):
        recorder().record("mean", 1.0, weight=weight)


@pytest.mark.parametrize("value", [None, "x", "1", b"1", [1.0], np.array([1.0, 2.0]), 10**400, {}])
def test_what_is_no_single_number_is_refused_by_its_name(value):
    record = recorder()
    with pytest.raises(DataError, match=r"^mean must be a number, or a scalar array or tensor; found"):
        record.record("mean", value)
    with pytest.raises(DataError, match=r"^weight of mean must be a number"):
        record.record("mean", 1.0, weight=value)
    assert record.reduce() == {}


def test_recorders_with_other_definitions_do_not_merge():
    other = Recorder(definitions=MetricTable([Metric(name="mean", unit="1", reduction="max", meaning="A test.")]))
    other.record("mean", 1.0)
    ours = recorder()
    ours.record("mean", 1.0)
    with pytest.raises(DataError, match="'mean' here and by 'max'"):
        ours.merge(other)


def test_undefined_names_raise_when_strict_and_average_when_not():
    with pytest.raises(DataError, match="'nonsense' is not defined"):
        recorder().record("nonsense", 1.0)
    loose = Recorder(definitions=TABLE)
    loose.record_all({"nonsense": 1.0})
    loose.record("nonsense", 2.0)
    assert loose.reduce() == {"nonsense": 1.5}


def test_a_timer_adds_up_and_records_also_what_fails():
    ticks = iter([0.0, 1.5, 10.0, 10.5])
    record = Recorder(strict=True, clock=lambda: next(ticks))
    with record.timer("gen"):
        pass
    with pytest.raises(RuntimeError), record.timer("gen"):
        raise RuntimeError
    assert record.reduce() == {"timing_s/gen": 2.0}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.floats(), max_size=6), st.integers(0, 3)), max_size=12),
    st.randoms(use_true_random=False),
)
def test_any_split_of_histograms_over_ranks_and_micro_batches_gives_the_same_json(batches, random):
    whole = recorder()
    whole.record_values("histogram", [value for values, _ in batches for value in values])
    ranks = [recorder() for _ in range(4)]
    for micro_batch, rank in random.sample(batches, len(batches)):
        ranks[rank].record_values("histogram", micro_batch)
    merged = recorder()
    for rank in ranks:
        merged.merge(pickle.loads(pickle.dumps(rank)))
    assert {name: one.to_json() for name, one in merged.histograms().items()} == {
        name: one.to_json() for name, one in whole.histograms().items()
    }
    assert merged.reduce() == whole.reduce()


def test_a_histogram_stands_beside_the_values():
    record = recorder()
    record.record("mean", 2.0)
    record.record_values("histogram", [[1.0, math.nan], [3.0, -math.inf]])
    with structlog.testing.capture_logs() as logs:
        assert record.reduce() == {"mean": 2.0, "nonfinite/histogram": 2.0}
    assert logs[0]["counts"] == {"histogram": 2}
    found = record.histograms()
    assert list(found) == ["histogram"]
    assert (found["histogram"].count, found["histogram"].mean) == (2, 2.0)
    record = recorder()
    record.record_values("histogram", [])
    assert (record.reduce(), record.histograms()) == ({}, {})


def test_values_and_histograms_are_not_mixed_up():
    record = recorder()
    with pytest.raises(DataError, match=r"histogram is a histogram.*Recorder\.record_values"):
        record.record("histogram", 1.0)
    other = recorder()
    other.record_values("histogram", [1.0])
    for call in (
        lambda: record.record_values("mean", [1.0]),
        lambda: Recorder(
            definitions=MetricTable([Metric(name="histogram", unit="1", reduction="mean", meaning="A test.")])
        ).merge(other),
    ):
        with pytest.raises(DataError, match="is reduced by 'mean', not as a histogram"):
            call()


def test_an_undefined_histogram_raises_when_strict_and_is_one_when_not():
    with pytest.raises(DataError, match="'nonsense' is not defined"):
        recorder().record_values("nonsense", [1.0])
    loose = Recorder(definitions=TABLE)
    loose.record_values("nonsense", [1.0])
    assert loose.histograms()["nonsense"].count == 1
    with pytest.raises(DataError, match="is a histogram"):
        loose.record("nonsense", 1.0)


class Broken:
    """A number whose device fails, with a number of dimensions, as a tensor has."""

    def __init__(self, ndim):
        self.ndim = ndim

    def __float__(self):
        raise RuntimeError("the device is lost")


def test_a_device_that_fails_is_not_taken_for_a_wrong_value():
    record = Recorder()
    with pytest.raises(RuntimeError, match="the device is lost"):
        record.record("mean", Broken(ndim=0))
    with pytest.raises(DataError, match=r"found Broken \(the device is lost\)"):
        record.record("mean", Broken(ndim=1))
