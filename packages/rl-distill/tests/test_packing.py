"""Packing rows into micro-batches by number of tokens."""

from functools import partial

import numpy as np
import pytest
import torch

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.data.row_keys import RowKey
from rl_core.errors import ShapeError
from rl_distill.packing import (
    pack_batch,
    pack_rows,
    plan_batch,
    plan_micro_batches,
    plan_ranks,
    scored_tokens,
    unpack_trained,
    unpack_values,
)

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


def greedy(lengths: list[int], budget: int) -> list[list[int]]:
    """Fill each part until the next length does not fit."""
    parts: list[list[int]] = []
    for length in lengths:
        if not parts or sum(parts[-1]) + length > budget:
            parts.append([])
        parts[-1].append(length)
    return parts


def even_parts(lengths: list[int], budget: int, *, count: int | None = None) -> list[list[int]]:
    """Cut sorted lengths into `count` parts, or the fewest of the budget: under the smallest budget that needs no more
    parts, then the parts with the most rows are halved until there are enough.
    """
    count = len(greedy(lengths, budget)) if count is None else count
    parts = next(cut for limit in range(1, budget + 1) if len(cut := greedy(lengths, limit)) <= count)
    while len(parts) < min(count, len(lengths)):
        at = max(range(len(parts)), key=lambda index: len(parts[index]))
        half = len(parts[at]) // 2
        parts[at : at + 1] = [parts[at][:half], parts[at][half:]]
    return parts


@pytest.mark.parametrize(
    ("lengths", "max_tokens"),
    [([5, 3, 8, 2], 8), ([4] * 6, 20), ([9, 1, 1], 4), ([7], 3), ([1, 1], 1), ([2, 2, 2], 6), ([3, 1, 2], 100)],
)
def test_plans_are_even_cuts_of_the_sorted_rows(lengths: list[int], max_tokens: int):
    check_plan(lengths, max_tokens)


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_are_even_cuts_of_the_sorted_rows(seed: int):
    random = np.random.default_rng(seed)
    check_plan(random.integers(1, 50, random.integers(1, 60)).tolist(), int(random.integers(1, 200)))


def check_plan(lengths: list[int], max_tokens: int) -> None:
    plan = plan_micro_batches(np.array(lengths), max_tokens=max_tokens)

    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    assert np.concatenate(plan).tolist() == order
    assert [[lengths[row] for row in rows] for rows in plan] == even_parts(sorted(lengths), max_tokens)


def test_plan_of_nothing_is_nothing():
    assert plan_micro_batches(np.array([], dtype=np.int64), max_tokens=8) == []


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "said"),
    [([3, 0, 2], 8, "row 1 has no tokens"), ([3], 0, "at least 1; found 0"), ([], -1, "at least 1; found -1")],
)
def test_plan_refuses_empty_rows_and_budgets(lengths: list[int], max_tokens: int, said: str):
    for plan in (plan_micro_batches, partial(plan_ranks, num_ranks=2)):
        with pytest.raises(ShapeError, match=said):
            plan(np.array(lengths, dtype=np.int64), max_tokens=max_tokens)


def test_a_plan_of_a_batch_refuses_a_row_that_is_empty_before_it_looks_for_prefixes():
    rows = [[1], []]
    batch = Batch([RowKey("a", i, 0) for i in range(2)], {"input_ids": Ragged.from_rows(rows, dtype="int32")})
    with pytest.raises(ShapeError, match="row 1 has no tokens"):
        plan_batch(batch, max_tokens=8, num_ranks=1, min_shared=1)


def test_a_plan_of_a_batch_shares_and_rounds_up_only_where_asked_to():
    rows = [[1, 2, 3, 4, row] for row in range(4)]
    batch = Batch([RowKey("a", i, 0) for i in range(4)], {"input_ids": Ragged.from_rows(rows, dtype="int32")})
    plan = lambda **options: [
        [part.tolist() for part in plan] for plan in plan_batch(batch, max_tokens=10, num_ranks=1, **options)
    ]
    assert plan() == [[[0, 1], [2, 3]]]
    assert plan(min_shared=1) == [[[0, 1, 2, 3]]]
    assert plan(min_shared=1, multiple_of=2) == [[[0, 1, 2, 3], []]]
    assert plan(min_shared=5) == plan()


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
    pack.micro_batch.columns["loss_mask"][3] = False
    assert scored_tokens(pack, mask="loss_mask").tolist() == [2, 5]


def test_unpack_values_restores_the_order_of_the_batch():
    batch = small_batch()
    packs = pack_batch(batch, max_tokens=3, device=CPU)

    values = unpack_values(packs, [pack.micro_batch.input_ids.float() * 10 for pack in packs], batch)

    assert [row.tolist() for row in values] == [[50, 60, 70], [80], [90, 100]]
    assert values.values.dtype == np.float32


def test_columns_of_indices_are_whole_numbers_and_others_floats():
    ids = Ragged.from_rows([[5, 6], [7]], dtype="int32")
    several = lambda dtype: Ragged(np.arange(6, dtype=dtype).reshape(3, 2), ids.offsets)
    names = {"teacher_ids": "int32", "nucleus_ids": "int32", "target_ids": "int32", "teacher_logprobs": "float32"}
    columns = {name: several(dtype) for name, dtype in names.items()}
    columns["teacher_index"] = Ragged.from_rows([[0, -1], [1]], dtype="int16")
    columns["routed_experts"] = Ragged(np.arange(6, dtype=np.int16).reshape(3, 2, 1), ids.offsets)
    batch = Batch([RowKey("a", i, 0) for i in range(2)], {"input_ids": ids, **columns})
    packed = pack_rows(batch, np.array([1, 0]), device=CPU).micro_batch.columns
    assert packed["teacher_logprobs"].dtype == torch.float32
    assert {packed[name].dtype for name in columns if name != "teacher_logprobs"} == {torch.int64}
    assert packed["teacher_ids"].tolist() == [[4, 5], [0, 1], [2, 3]]
    assert packed["teacher_index"].tolist() == [1, 0, -1]


@pytest.mark.parametrize("has_mask", [True, False])
def test_values_of_trained_tokens_return_to_their_rows(has_mask: bool):
    batch = small_batch() if has_mask else small_batch().only({"input_ids", "advantages"})
    packs = pack_batch(batch, max_tokens=3, device=CPU)
    scored = [
        {"one": ids.float(), "pairs": torch.stack([ids, -ids], 1).float().requires_grad_()}
        for ids in (pack.micro_batch.input_ids for pack in packs)
    ]

    found = unpack_trained(packs, scored, batch)

    expected = [0, 6, 7, 8, 0, 10] if has_mask else [5, 6, 7, 8, 9, 10]
    assert len(packs) == 2
    assert found["one"].values.tolist() == expected
    assert found["pairs"].values.tolist() == [[one, -one] for one in expected]
    assert unpack_trained([], [], batch) == {}
    for unpack in (
        unpack_trained,
        lambda packs, values, batch: unpack_values(packs, [one["one"] for one in values], batch),
    ):
        with pytest.raises(ValueError, match="argument 2 is"):
            unpack(packs, scored[:1], batch)


def test_ranks_get_equally_many_micro_batches_and_nearly_equal_tokens():
    lengths = np.random.default_rng(0).integers(1, 60, size=101)

    plans = plan_ranks(lengths, max_tokens=100, num_ranks=4)

    rows = np.concatenate([rows for plan in plans for rows in plan])
    assert sorted(rows.tolist()) == list(range(101))
    assert len({len(plan) for plan in plans}) == 1
    tokens = [sum(int(lengths[rows].sum()) for rows in plan) for plan in plans]
    assert max(tokens) - min(tokens) <= 2
    assert max(lengths[rows].sum() for plan in plans for rows in plan) <= 100


@pytest.mark.parametrize("multiple_of", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 17])
def test_each_rank_has_even_cuts_of_the_rows_that_it_is_given(num_rows: int, num_ranks: int, multiple_of: int):
    lengths = np.random.default_rng(num_rows).integers(1, 9, size=num_rows)

    plans = plan_ranks(lengths, max_tokens=16, num_ranks=num_ranks, multiple_of=multiple_of)

    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in sorted(range(num_rows), key=lambda row: -lengths[row]):  # the longest first, to the least loaded
        min(shares, key=lambda share: sum(lengths[row] for row in share)).append(row)
    fewest = max(len(even_parts(sorted(lengths[share].tolist()), 16)) for share in shares if share)
    count = -(-fewest // multiple_of) * multiple_of
    for share, plan in zip(shares, plans, strict=True):
        of_rank = sorted(lengths[share].tolist()) if share else []
        expected = even_parts(of_rank, 16, count=count) if share else []
        assert [lengths[rows].tolist() for rows in plan] == expected + [[]] * (count - len(expected))
        assert [int(row) for rows in plan for row in rows] == sorted(sorted(share), key=lambda row: lengths[row])


@pytest.mark.parametrize("num_rows", [0, 1, 3, 9])
def test_the_number_of_micro_batches_is_a_multiple_and_the_last_are_empty_where_rows_are_few(num_rows: int):
    plans = plan_ranks(np.full(num_rows, 5), max_tokens=10, num_ranks=2, multiple_of=4)

    assert {len(plan) for plan in plans} == {4}
    assert sorted(int(row) for plan in plans for rows in plan for row in rows) == list(range(num_rows))
    for plan in plans:
        sizes = [len(rows) for rows in plan]
        assert sizes == sorted(sizes, key=lambda size: size == 0)
