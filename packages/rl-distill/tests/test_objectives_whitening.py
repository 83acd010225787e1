import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import ShapeError
from rl_distill.objectives.batch_advantages import masked_whiten


def test_whitened_values_equal_a_literal():
    # Mean 2, unbiased variance 1.
    values = torch.tensor([1.0, math.nan, 2.0, 3.0], dtype=torch.float64)
    found = masked_whiten(values, torch.tensor([True, False, True, True]), eps=0.0)
    assert found.tolist() == [-1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 7])
def test_nothing_to_compare_gives_zeros(values):
    found = masked_whiten(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))
    assert found.tolist() == [0.0] * len(values)


def test_all_masked_gives_zeros():
    assert masked_whiten(torch.tensor([1.0, 2.0]), torch.zeros(2, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"mask must have shape \[T\] like values, \[2\]; found \[3\]"):
        masked_whiten(torch.zeros(2), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"torch\.bool"):
        masked_whiten(torch.zeros(2), torch.ones(2))


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=3, max_size=20, unique=True))
def test_mean_is_0_and_variance_1(values):
    found = masked_whiten(torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.bool), eps=0.0)
    assert found.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert found.var().item() == pytest.approx(1.0, rel=1e-6)
