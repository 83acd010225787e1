"""Batches, compared with plain lists of rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core import Batch, Ragged, RowKey
from rl_core.data.ragged import offsets_of, token_positions
from rl_core.errors import DataError, ShapeError
from rl_core.testing import make_trajectory

FAST = settings(max_examples=60, deadline=None)
ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=8)


@st.composite
def rows_and_indices(draw):
    rows = draw(ROWS)
    indices = st.lists(st.integers(-len(rows), len(rows) - 1), max_size=10) if rows else st.just([])
    return rows, draw(indices)


def batch_of(rows, *, first=0):
    """Return a batch of token rows whose rewards are their indices, counted from `first`."""
    return Batch(
        [RowKey(f"p{(first + i) // 2}", (first + i) % 2, 0) for i in range(len(rows))],
        {
            "input_ids": Ragged.from_rows(rows, dtype=np.int32),
            "reward": np.arange(first, first + len(rows), dtype=np.float32),
        },
        extras=[{"row": first + i} for i in range(len(rows))],
    )


def rows_of(batch):
    """Return the key, tokens, reward and extras of each row."""
    ids = [row.tolist() for row in batch.ragged("input_ids")]
    return list(zip(batch.keys, ids, batch.dense("reward").tolist(), batch.extras, strict=True))


@FAST
@given(ROWS)
def test_ragged_gives_back_its_rows(rows):
    ragged = Ragged.from_rows(rows, dtype=np.int32)
    assert [row.tolist() for row in ragged] == rows
    assert [ragged[-i - 1].tolist() for i in range(len(rows))] == rows[::-1]
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert (len(ragged), ragged.values.dtype) == (len(rows), np.int32)


@FAST
@given(rows_and_indices())
def test_ragged_selects_like_a_list(case):
    rows, indices = case
    selected = Ragged.from_rows(rows, dtype=np.int32).select(indices)
    assert [row.tolist() for row in selected] == [rows[i] for i in indices]


@FAST
@given(ROWS, st.data())
def test_batch_selects_like_a_list_of_rows(rows, data):
    indices = data.draw(st.permutations(range(len(rows))))
    indices = indices[: data.draw(st.integers(0, len(rows)))]
    batch = batch_of(rows)
    assert rows_of(batch.select(indices)) == [rows_of(batch)[i] for i in indices]


@FAST
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_concat_is_one_batch_after_the_other(parts):
    batches, first = [], 0
    for rows in parts:
        batches.append(batch_of(rows, first=first))
        first += len(rows)
    joined = Batch.concat(batches)
    assert rows_of(joined) == [row for batch in batches for row in rows_of(batch)]
    assert rows_of(joined) == rows_of(batch_of([row for rows in parts for row in rows]))


@FAST
@given(ROWS)
def test_columns_are_added_replaced_and_left_out(rows):
    batch = batch_of(rows)
    values = Ragged(np.ones(len(batch.ragged("input_ids").values), np.float32), batch.ragged("input_ids").offsets)
    more = batch.with_columns({"values": values, "reward": -batch.dense("reward")})
    assert more.names == {"input_ids", "reward", "values"}
    assert rows_of(more) == [(key, ids, -reward, extra) for key, ids, reward, extra in rows_of(batch)]
    assert batch.names == {"input_ids", "reward"}
    assert rows_of(more.only({"input_ids", "reward"})) == rows_of(more)
    assert more.only({"values"}).names == {"values"}


@FAST
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=8))
def test_token_positions_are_the_ranges_of_the_rows(spans):
    starts = np.asarray([start for start, _ in spans], dtype=np.int64)
    lengths = np.asarray([length for _, length in spans], dtype=np.int64)
    expected = [position for start, length in spans for position in range(start, start + length)]
    assert token_positions(starts, lengths).tolist() == expected


def test_offsets_of_no_rows_are_one_zero():
    assert offsets_of([]).tolist() == [0]
    assert offsets_of([3, 0, 2]).tolist() == [0, 3, 3, 5]


def test_trajectories_become_columns():
    batch = Batch.from_trajectories(
        [
            make_trajectory("p1", 0, reward=0.5, finish_reason="length", extras={"note": "a"}),
            make_trajectory("p0", 3, 1, num_response_tokens=1, reward=None),
        ]
    )
    assert batch.keys == (("p1", 0, 0), ("p0", 3, 1))
    assert [row.tolist() for row in batch.ragged("input_ids")] == [[1, 2, 0, 0, 0], [1, 2, 3]]
    assert batch.ragged("loss_mask")[1].tolist() == [False, False, True]
    assert batch.ragged("rollout_logprobs").values.tolist() == [0, 0, -0.5, -0.5, -0.5, 0, 0, -0.5]
    assert batch.ragged("policy_versions")[0].tolist() == [-1, -1, 0, 0, 0]
    assert batch.dense("is_truncated").tolist() == [True, False]
    assert batch.dense("num_prompt_tokens").tolist() == [2, 2]
    assert batch.dense("reward")[0] == np.float32(0.5)
    assert np.isnan(batch.dense("reward")[1])
    assert batch.extras == ({"note": "a"}, {})
    assert batch.group_index().tolist() == [0, 1]


def test_experts_become_a_column_and_are_minus_one_where_nobody_told_them():
    experts = np.arange(20, dtype=np.int16).reshape(5, 2, 2)
    told, untold = make_trajectory("p0", 0, routed_experts=experts), make_trajectory("p0", 1, num_response_tokens=1)
    column = Batch.from_trajectories([told, untold]).ragged("routed_experts")
    assert column[0].tolist() == experts.tolist()
    assert column[1].tolist() == np.full((3, 2, 2), -1).tolist()
    assert "routed_experts" not in Batch.from_trajectories([untold])
    other = make_trajectory("p1", 0, routed_experts=experts[:, :1])
    with pytest.raises(ShapeError, match=r"one shape per token in all trajectories; found \[\(1, 2\), \(2, 2\)\]"):
        Batch.from_trajectories([told, other])
    with pytest.raises(ShapeError, match="with T = 5"):
        make_trajectory("p0", 0, routed_experts=experts[1:])


def test_nuclei_become_a_column_and_are_minus_one_where_nothing_was_cut():
    nuclei = np.arange(15, dtype=np.int32).reshape(5, 3)
    batch = Batch.from_trajectories([make_trajectory("p0", 0, nucleus_ids=nuclei), make_trajectory("p0", 1)])
    assert batch.ragged("nucleus_ids")[0].tolist() == nuclei.tolist()
    assert batch.ragged("nucleus_ids")[1].tolist() == np.full((5, 3), -1).tolist()
    assert batch["nucleus_ids"].dtype == np.int32
    with pytest.raises(ShapeError, match=r"nucleus_ids must have one shape"):
        Batch.from_trajectories([make_trajectory("p0", s, nucleus_ids=nuclei[:, s:]) for s in range(2)])


def test_group_index_counts_prompts_by_first_appearance():
    keys = [RowKey(uid, session, 0) for session, uid in enumerate(["b", "a", "b", "c", "a"])]
    assert Batch(keys, {}).group_index().tolist() == [0, 1, 0, 2, 1]


def test_nothing_is_copied_for_views_tensors_and_more_columns():
    batch = batch_of([[1, 2], [3], [4, 5, 6]])
    ids = batch.ragged("input_ids")
    assert np.shares_memory(ids[1], ids.values)
    assert np.shares_memory(ids.select([1, 2]).values, ids.values)
    assert not np.shares_memory(ids.select([0, 2]).values, ids.values)
    tensor = batch.tensor("input_ids")
    assert tensor.dtype == torch.int32
    assert tensor.data_ptr() == ids.values.ctypes.data
    assert batch.tensor("reward").data_ptr() == batch.dense("reward").ctypes.data
    more = batch.with_columns({"reward": np.zeros(3, np.float32)})
    assert more.ragged("input_ids") is ids
    assert more.only({"input_ids"}).ragged("input_ids") is ids


def test_size_is_the_bytes_of_the_columns():
    batch = batch_of([[1, 2], [3]])
    assert batch.size_bytes == 3 * 4 + 3 * 8 + 2 * 4


def test_empty_batches_have_no_rows():
    assert len(Batch.concat([])) == 0
    empty = Batch.from_trajectories([])
    assert (len(empty), len(empty.ragged("input_ids")), empty.group_index().tolist()) == (0, 0, [])
    assert len(empty.select([])) == 0


@pytest.mark.parametrize("rows", [[True, False, True], [0.0, 1.0], [[0], [1]]])
def test_rows_are_selected_by_integers_alone(rows):
    batch = batch_of([[1], [2], [3]])
    for select in (batch.select, batch.ragged("input_ids").select):
        with pytest.raises(ShapeError, match=r"rows must be \[M\] integers; .*np\.flatnonzero"):
            select(rows)


@pytest.mark.parametrize("row", [3, -4])
def test_rows_outside_are_refused(row):
    batch = batch_of([[1], [2], [3]])
    for take in (batch.select, batch.ragged("input_ids").select):
        with pytest.raises(IndexError, match=f"below 3, the number of rows; found {row}"):
            take([0, row])
    with pytest.raises(IndexError, match=f"found {row}"):
        batch.ragged("input_ids")[row]


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [], [[0, 3]]])
def test_offsets_that_do_not_cover_the_values_are_refused(offsets):
    with pytest.raises(ShapeError, match="offsets must"):
        Ragged(np.zeros(3), np.asarray(offsets, dtype=np.int64))


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"ids": np.zeros(2)}, DataError, "unknown column 'ids'"),
        ({"reward": Ragged.from_rows([[1.0], [2.0]], dtype=np.float32)}, ShapeError, "'reward' must be dense"),
        ({"values": np.zeros(2, np.float32)}, ShapeError, "'values' must be ragged"),
        (
            {"reward": np.full(2, 1e300)},
            ShapeError,
            "'reward' must be .* float32; found float64 .* do not fit into float32",
        ),
        ({"reward": ["1", "2"]}, ShapeError, "'reward' must be .* float32; found"),
        ({"reward": 1.0}, ShapeError, "'reward' must have 2 rows; found a single number"),
        ([1.0], DataError, "columns must be a Mapping"),
        ({"reward": np.zeros(3, np.float32)}, ShapeError, "'reward' must have 2 rows; found 3"),
        (
            {
                "input_ids": Ragged.from_rows([[1, 2], [3]], dtype=np.int32),
                "values": Ragged.from_rows([[1.0], [2.0, 3.0]], dtype=np.float32),
            },
            ShapeError,
            "row 0 of column 'values' must be as long as in 'input_ids', 2 tokens; found 1",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, error, message):
    with pytest.raises(error, match=message):
        Batch([RowKey("p0", 0, 0), RowKey("p0", 1, 0)], columns)


def test_rows_are_there_once():
    with pytest.raises(DataError, match=r"row \('p0', 1, 0\) appears twice"):
        Batch([RowKey("p0", 0, 0), RowKey("p0", 1, 0), RowKey("p0", 1, 0)], {})
    batch = batch_of([[1]])
    with pytest.raises(DataError, match="appears twice"):
        Batch.concat([batch, batch])
    with pytest.raises(DataError, match="appears twice"):
        batch.select([0, 0])


def test_extras_belong_to_rows():
    with pytest.raises(ShapeError, match="extras must have 1 rows; found 2"):
        Batch([RowKey("p0", 0, 0)], {}, extras=[{}, {}])


def test_batches_of_other_columns_are_not_joined():
    batch = batch_of([[1]])
    with pytest.raises(DataError, match=r"\['reward'\] differ"):
        Batch.concat([batch, batch_of([[2]], first=1).only({"input_ids"})])


def test_columns_are_asked_for_by_kind():
    batch = batch_of([[1]])
    with pytest.raises(DataError, match=r"no column 'values'; it has \['input_ids', 'reward'\]"):
        batch["values"]
    with pytest.raises(DataError, match="no column 'values'"):
        batch.only({"values"})
    with pytest.raises(ShapeError, match="is ragged"):
        batch.dense("input_ids")
    with pytest.raises(ShapeError, match="is dense"):
        batch.ragged("reward")
    assert "reward" in batch
    assert "values" not in batch
