"""Computed tokens that need the engine's experts but lack them."""

import numpy as np
import pytest
import torch

from rl_core.data import Batch, Ragged, RowKey
from rl_distill.megatron.rank_batches import unknown_experts
from rl_distill.packing import pack_rows

KNOWN, NONE = [[-1, -1], [0, 1]], [[-1, -1], [-1, -1]]
"""Experts of a token; layer 0 is dense."""


@pytest.mark.parametrize(
    ("trained", "known", "expected"),
    [
        ([[1, 2], [1, 2, 3]], [[0, 1], [0, 1, 2]], (0, 5)),
        ([[1, 2], [1, 2, 3]], [[0], [0, 2]], (2, 5)),
        ([[1], [1]], [[0], [0]], (0, 2)),  # no trained token follows the unknown ones
        ([[], [3]], [[], []], (3, 3)),
    ],
)
@pytest.mark.parametrize("min_shared", [0, 1])
def test_tokens_count_where_a_trained_one_follows(
    trained: list[list[int]], known: list[list[int]], expected: tuple[int, int], min_shared: int
) -> None:
    ids = Ragged.from_rows([np.arange(3), np.arange(4) + 10], dtype="int32")
    mask = [position in row for row, length in zip(trained, (3, 4), strict=True) for position in range(length)]
    experts = [KNOWN if at in row else NONE for row, length in zip(known, (3, 4), strict=True) for at in range(length)]
    columns = {
        "input_ids": ids,
        "loss_mask": Ragged(np.asarray(mask, np.bool_), ids.offsets),
        "routed_experts": Ragged(np.asarray(experts, np.int16), ids.offsets),
    }
    batch = Batch([RowKey("p", index, 0) for index in range(2)], columns)
    pack = pack_rows(batch, np.arange(2), device=torch.device("cpu"), min_shared=min_shared)
    assert unknown_experts([pack], [1]) == expected
    empty = pack_rows(batch, np.zeros(0, np.int64), device=torch.device("cpu"))
    assert unknown_experts([empty, pack], [1]) == expected


def test_a_token_of_several_rows_counts_once() -> None:
    ids = Ragged.from_rows([np.asarray([7, 8, 9, row]) for row in range(3)], dtype="int32")
    mask = np.tile([False, False, False, True], 3)
    experts = np.asarray([[*[KNOWN] * 2, NONE, NONE]] * 3, np.int16).reshape(12, 2, 2)
    columns = {"input_ids": ids, "loss_mask": Ragged(mask, ids.offsets), "routed_experts": Ragged(experts, ids.offsets)}
    batch = Batch([RowKey("p", index, 0) for index in range(3)], columns)
    for min_shared, expected in ((0, (3, 9)), (1, (1, 3))):
        pack = pack_rows(batch, np.arange(3), device=torch.device("cpu"), min_shared=min_shared)
        assert unknown_experts([pack], [1]) == expected
