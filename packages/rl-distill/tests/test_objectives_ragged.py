import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_distill.objectives.ragged import discounted_sums, next_values, row_maxima, row_means

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, -3.0], dtype=torch.float64)
OFFSETS = torch.tensor([0, 3, 3, 5])


def test_discounted_sums_equal_a_literal():
    found = discounted_sums(VALUES, OFFSETS, discount=0.5)
    assert found.tolist() == [1 + 1 + 1, 2 + 2, 4, 8 - 1.5, -3]


@pytest.mark.parametrize(("discount", "expected"), [(0.0, [1, 2, 4, 8, -3]), (1.0, [7, 6, 4, 5, -3])])
def test_discount_of_none_and_all_leaves_totals_or_values(discount, expected):
    assert discounted_sums(VALUES, OFFSETS, discount=discount).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-10, 10), max_size=9), max_size=6), st.floats(0, 1))
def test_discounted_sums_are_the_recursion(rows, discount):
    values = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    expected = []
    for row in rows:
        sums, carried = [], 0.0
        for value in reversed(row):
            carried = value + discount * carried
            sums.append(carried)
        expected.extend(reversed(sums))
    assert discounted_sums(values, offsets, discount=discount).tolist() == pytest.approx(expected, abs=1e-9)


def test_long_rows_keep_their_digits():
    found = discounted_sums(torch.ones(20_000, dtype=torch.float64), torch.tensor([0, 20_000]), discount=0.9)
    assert found[0].item() == pytest.approx(10.0, rel=1e-12)
    assert found[-1].item() == 1.0


def test_next_values_equal_a_literal():
    assert next_values(VALUES, OFFSETS).tolist() == [2, 4, 0, -3, 0]


def test_means_and_maxima_of_rows():
    mask = torch.tensor([True, False, True, False, False])
    assert row_means(VALUES, mask, OFFSETS).tolist() == [2.5, 0, 0]
    assert row_maxima(-VALUES, mask, OFFSETS).tolist() == [-1, 0, 0]
