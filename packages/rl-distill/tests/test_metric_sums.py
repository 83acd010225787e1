"""Metrics from micro-batches and ranks equal those of the whole batch."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_distill.learner import metric_totals, metric_values

VALUES = st.lists(st.integers(-1000, 1000), min_size=1, max_size=30)


def sums_of(values: list[int]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the metric sums of a micro-batch, which may have no values."""
    tensor, count = torch.tensor(values, dtype=torch.float32), torch.tensor(len(values))
    low, high = (tensor.amin(), tensor.amax()) if values else (torch.tensor(math.inf), torch.tensor(-math.inf))
    return {"loss": (tensor.sum(), count), "loss_min": (low, count), "loss_max": (high, count)}


@given(VALUES, st.lists(st.integers(0, 30), max_size=6), st.integers(1, 4))
def test_any_split_says_the_same(values: list[int], cuts: list[int], num_ranks: int) -> None:
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    micro = [sums_of(values[start:stop]) for start, stop in itertools.pairwise(edges)]
    found = metric_values(metric_totals(micro[rank::num_ranks]) for rank in range(num_ranks))
    assert found["loss"] == pytest.approx(sum(values) / len(values), abs=1e-9)
    assert (found["loss_min"], found["loss_max"]) == (min(values), max(values))


def test_what_has_no_value_is_left_out() -> None:
    assert metric_values([metric_totals([sums_of([]), sums_of([])]), {}]) == {}


@pytest.mark.parametrize("order", [1, -1])
def test_nan_is_never_lost_among_extremes(order: int) -> None:
    nan, one = (torch.tensor(math.nan), torch.tensor(1)), (torch.tensor(5.0), torch.tensor(1))
    micro = [{"loss_max": nan, "loss_min": nan}, {"loss_max": one, "loss_min": one}][::order]
    for values in (metric_values([metric_totals(micro)]), metric_values(metric_totals([part]) for part in micro)):
        assert values
        assert all(math.isnan(value) for value in values.values())
