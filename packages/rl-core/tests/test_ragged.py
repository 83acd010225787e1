"""Ragged rows, compared with lists of lists; no values are copied until rows must be contiguous."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core import Ragged
from rl_core.data.ragged import row_indices
from rl_core.errors import ShapeError

FAST = settings(max_examples=80, deadline=None)
ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=5), max_size=6)


def lists_of(ragged):
    return [row.tolist() for row in ragged]


def flat(rows):
    return [value for row in rows for value in row]


@st.composite
def mixed(draw):
    """Draw rows after random selections and joins, as lists and as Ragged."""
    rows = draw(ROWS)
    ragged = Ragged.from_rows(rows, dtype=np.int32)
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            indices = draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8)) if rows else []
            rows, ragged = [rows[i] for i in indices], ragged.select(indices)
        else:
            more = draw(ROWS)
            parts = [(rows, ragged), (more, Ragged.from_rows(more, dtype=np.int32))]
            if draw(st.booleans()):
                parts.append((rows, ragged))
            rows = [row for part, _ in parts for row in part]
            ragged = Ragged.concat([part for _, part in parts])
        if draw(st.booleans()):
            assert ragged.values.tolist() == [value for row in rows for value in row]
    return rows, ragged


@FAST
@given(mixed())
def test_rows_are_those_of_the_lists(case):
    rows, ragged = case
    assert len(ragged) == len(rows)
    assert lists_of(ragged) == rows
    assert [ragged[i].tolist() for i in range(-len(rows), len(rows))] == rows * 2
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert ragged.offsets.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    assert [value for run in ragged.runs() for value in run.tolist()] == flat(rows)
    assert ragged.values.tolist() == flat(rows)
    assert lists_of(ragged) == rows
    assert (ragged.dtype, ragged.width) == (np.int32, 4)
    assert ragged.nbytes == 4 * sum(map(len, rows)) + 8 * (len(rows) + 1)


@FAST
@given(mixed())
def test_runs_are_as_few_as_rows_allow(case):
    rows, ragged = case
    runs = list(ragged.runs())
    assert len(runs) <= max(len(rows), 1)
    ragged.values  # noqa: B018 - puts the rows end to end
    assert len(list(ragged.runs())) == (1 if rows else 0)


def test_rows_side_by_side_are_one_run():
    ragged = Ragged.from_rows([[1], [2, 3], [], [4], [5]], dtype=np.int32)
    assert [run.tolist() for run in ragged.select([1, 2, 3]).runs()] == [[2, 3, 4]]
    assert [run.tolist() for run in ragged.select([3, 0, 1]).runs()] == [[4], [1, 2, 3]]
    both = Ragged.concat([ragged.select([0, 1]), ragged.select([2, 3])])
    assert [run.tolist() for run in both.runs()] == [[1, 2, 3, 4]]
    assert np.shares_memory(both.values, ragged.values)


def test_select_and_concat_copy_nothing():
    first, second = (Ragged.from_rows([[i, 2], [3], [4, 5, 6]], dtype=np.int32) for i in (1, 2))
    selected = first.select([2, 0])
    joined = Ragged.concat([selected, second, first])
    for row, source in [(selected[0], first), (joined[0], first), (joined[3], second), (joined[-1], first)]:
        assert np.shares_memory(row, source.values)
    assert all(
        np.shares_memory(row, source.values) for row, source in zip(joined.select([2, 7]), [second, first], strict=True)
    )
    assert Ragged.concat([first]) is first


def test_values_are_joined_once_and_stay():
    ragged = Ragged.from_rows([[1, 2], [3], [4]], dtype=np.int32)
    selected = ragged.select([2, 0])
    values = selected.values
    assert values is selected.values
    assert not np.shares_memory(values, ragged.values)
    assert np.shares_memory(selected[0], values)
    assert lists_of(selected) == [[4], [1, 2]]
    assert ragged.select([0, 1, 2]).values.base is not None
    assert np.shares_memory(ragged.select([1, 2]).values, ragged.values)


def test_joined_values_let_go_of_what_they_were_selected_from():
    source = np.zeros(1000, dtype=np.int32)
    selected = Ragged(source, np.asarray([0, 1, 999, 1000])).select([2, 0])
    values = selected.values
    assert len(values) == 2
    assert not any(np.shares_memory(source, row) for row in selected)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (0,)])
def test_elements_may_have_a_shape(shape):
    rows = [np.arange(n * int(np.prod(shape))).reshape(n, *shape) for n in (2, 0, 3)]
    ragged = Ragged.from_rows(rows, dtype=np.float32)
    assert ragged.width == 4 * int(np.prod(shape))
    joined = Ragged.concat([ragged.select([2, 1]), ragged])
    assert lists_of(joined) == [rows[i].tolist() for i in (2, 1, 0, 1, 2)]
    assert joined.values.shape == (8, *shape)
    assert joined.select([]).values.shape == (0, *shape)


def test_rows_of_other_kinds_are_not_joined():
    ints, floats = Ragged.from_rows([[1]], dtype=np.int32), Ragged.from_rows([[1]], dtype=np.float32)
    with pytest.raises(ShapeError, match=r"one dtype and shape; found .*float32.*int32"):
        Ragged.concat([ints, floats])
    with pytest.raises(ShapeError, match="one dtype and shape"):
        Ragged.concat([ints, Ragged.from_rows([np.ones((1, 2))], dtype=np.int32)])


def test_aligned_columns_share_their_offsets():
    offsets = np.asarray([0, 2, 2, 3])
    columns = Ragged.aligned({"a": np.zeros(3), "b": np.ones((3, 2)), "c": np.zeros(3, bool)}, offsets)
    assert columns["a"].lengths is columns["b"].lengths is columns["c"].lengths
    assert lists_of(columns["b"]) == [[[1, 1], [1, 1]], [], [[1, 1]]]
    with pytest.raises(ShapeError, match=r"0 to len\(values\) = 2"):
        Ragged.aligned({"a": np.zeros(3), "b": np.zeros(2)}, offsets)
    assert Ragged.aligned({}, offsets) == {}


def test_indices_count_from_the_end_and_stay_as_they_were_given():
    given_indices = np.asarray([-1, 0, -3])
    assert row_indices(given_indices, num_rows=3).tolist() == [2, 0, 0]
    assert given_indices.tolist() == [-1, 0, -3]
    assert row_indices([], num_rows=0).tolist() == []
    assert row_indices(np.asarray([1], dtype=np.uint8), num_rows=2).tolist() == [1]


def test_threads_may_read_while_one_puts_rows_end_to_end():
    rng = np.random.default_rng(0)
    source = Ragged.from_rows([rng.integers(0, 9, rng.integers(0, 6)) for _ in range(200)], dtype=np.int32)
    errors = []
    for _ in range(30):
        order = rng.permutation(200)
        shared = Ragged.concat([source.select(order[:90]), source.select(order[90:])])
        expected = [source[i].tolist() for i in order]
        barrier = threading.Barrier(4)

        def read(shared=shared, expected=expected, barrier=barrier):
            barrier.wait()
            for _ in range(3):
                if lists_of(shared) != expected or shared.values.tolist() != flat(expected):
                    errors.append("other rows")
                if lists_of(Ragged.concat([shared, shared]).select(range(200))) != expected:
                    errors.append("other rows after a join")

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
