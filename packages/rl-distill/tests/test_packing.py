"""Packing rows into micro-batches by number of tokens."""

import numpy as np
import pytest
import torch

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.data.row_keys import RowKey
from rl_core.errors import ShapeError
from rl_distill.packing import pack_batch, pack_rows, plan_micro_batches, plan_ranks, scored_tokens, unpack_values

CPU = torch.device("cpu")


def small_batch() -> Batch:
    def column(rows: list[list[float]], dtype: str) -> Ragged:
        return Ragged.from_rows(rows, dtype=dtype)

    columns = {
        "input_ids": column([[5, 6, 7], [8], [9, 10]], "int32"),
        "loss_mask": column([[False, True, True], [True], [False, True]], "bool"),
        "policy_versions": column([[-1, 3, 3], [3], [-1, 4]], "int32"),
        "advantages": column([[0, 1.5, 1.5], [2], [0, -1]], "float32"),
    }
    reward = np.zeros(3, dtype=np.float32)
    return Batch([RowKey("a", i, 0) for i in range(3)], {**columns, "reward": reward})


def test_plan_sorts_by_length_and_fills_the_budget():
    plan = plan_micro_batches(np.array([5, 3, 8, 2]), max_tokens=8)

    assert [rows.tolist() for rows in plan] == [[3, 1], [0], [2]]


def test_plan_is_even():
    plan = plan_micro_batches(np.full(6, 4), max_tokens=20)

    assert [len(rows) for rows in plan] == [3, 3]


def test_plan_gives_a_row_over_the_budget_its_own_micro_batch():
    plan = plan_micro_batches(np.array([9, 1, 1]), max_tokens=4)

    assert [rows.tolist() for rows in plan] == [[1, 2], [0]]


@pytest.mark.parametrize("seed", range(20))
def test_plan_has_each_row_once_within_the_budget(seed: int):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 50, random.integers(1, 60))
    max_tokens = int(random.integers(1, 200))

    plan = plan_micro_batches(lengths, max_tokens=max_tokens)

    assert sorted(np.concatenate(plan).tolist()) == list(range(len(lengths)))
    assert all(lengths[rows].sum() <= max_tokens or len(rows) == 1 for rows in plan)
    assert [rows.tolist() for rows in plan] == [
        rows.tolist() for rows in plan_micro_batches(lengths, max_tokens=max_tokens)
    ]


def test_plan_of_nothing_is_nothing():
    assert plan_micro_batches(np.array([], dtype=np.int64), max_tokens=8) == []


@pytest.mark.parametrize(("lengths", "max_tokens"), [([3, 0], 8), ([3], 0)])
def test_plan_refuses_empty_rows_and_budgets(lengths: list[int], max_tokens: int):
    with pytest.raises(ShapeError, match="row 1 has no tokens" if max_tokens else "must be at least 1; found 0"):
        plan_micro_batches(np.array(lengths), max_tokens=max_tokens)


def test_pack_rows_joins_rows_in_the_given_order():
    micro_batch = pack_rows(small_batch(), np.array([2, 0]), device=CPU).micro_batch

    assert micro_batch.input_ids.tolist() == [9, 10, 5, 6, 7]
    assert micro_batch.input_ids.dtype == torch.int64
    assert micro_batch.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert micro_batch.offsets.tolist() == [0, 2, 5]
    assert set(micro_batch.columns) == {"loss_mask", "policy_versions", "advantages"}
    assert micro_batch.columns["loss_mask"].tolist() == [False, True, False, True, True]
    assert micro_batch.columns["policy_versions"].dtype == torch.float32
    assert micro_batch.columns["advantages"].tolist() == [0, -1, 0, 1.5, 1.5]


def test_scored_tokens_leave_out_first_and_masked_tokens():
    pack = pack_rows(small_batch(), np.array([1, 0, 2]), device=CPU)

    assert scored_tokens(pack, mask=None).tolist() == [2, 3, 5]
    assert scored_tokens(pack, mask="loss_mask").tolist() == [2, 3, 5]


def test_unpack_values_restores_the_order_of_the_batch():
    batch = small_batch()
    packs = pack_batch(batch, max_tokens=3, device=CPU)

    values = unpack_values(packs, [pack.micro_batch.input_ids.float() * 10 for pack in packs], batch)

    assert [row.tolist() for row in values] == [[50, 60, 70], [80], [90, 100]]
    assert values.values.dtype == np.float32


def test_ranks_get_equally_many_micro_batches_and_nearly_equal_tokens():
    lengths = np.random.default_rng(0).integers(1, 60, size=101)

    plans = plan_ranks(lengths, max_tokens=100, num_ranks=4)

    rows = np.concatenate([rows for plan in plans for rows in plan])
    assert sorted(rows.tolist()) == list(range(101))
    assert len({len(plan) for plan in plans}) == 1
    tokens = [sum(int(lengths[rows].sum()) for rows in plan) for plan in plans]
    assert max(tokens) - min(tokens) <= 2
    assert max(lengths[rows].sum() for plan in plans for rows in plan) <= 100


def test_one_rank_is_cut_as_a_batch_without_ranks():
    lengths = np.random.default_rng(1).integers(1, 60, size=30)

    (plan,) = plan_ranks(lengths, max_tokens=128, num_ranks=1)

    expected = plan_micro_batches(lengths, max_tokens=128)
    assert [rows.tolist() for rows in plan] == [rows.tolist() for rows in expected]


@pytest.mark.parametrize("num_rows", [0, 1, 3, 9])
def test_the_number_of_micro_batches_is_a_multiple_and_the_last_are_empty_where_rows_are_few(num_rows: int):
    plans = plan_ranks(np.full(num_rows, 5), max_tokens=10, num_ranks=2, multiple_of=4)

    assert {len(plan) for plan in plans} == {4}
    assert sorted(int(row) for plan in plans for rows in plan for row in rows) == list(range(num_rows))
    for plan in plans:
        sizes = [len(rows) for rows in plan]
        assert sizes == sorted(sizes, key=lambda size: size == 0)
