"""A linear map with another one for its gradient."""

import pytest
import torch
import torch.distributed as dist

from rl_distill.linear_map import linear_map, sum_over_ranks


def test_the_gradient_is_that_of_the_given_map():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    chosen = torch.tensor([2, 0])
    rows = linear_map(
        x,
        chosen,
        forward=lambda x, chosen: x[chosen],
        backward=lambda grad, chosen: 10.0 * torch.zeros(3).index_copy(0, chosen, grad),
    )
    rows.backward(torch.tensor([1.0, 2.0]))
    assert rows.tolist() == [3.0, 1.0]
    assert x.grad is not None
    assert x.grad.tolist() == [20.0, 0.0, 10.0]


def test_one_rank_keeps_its_values():
    values = torch.tensor([1.0])
    assert sum_over_ranks(values, group=None) is values


class Group:
    """A process group of a size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def test_ranks_sum_their_values_in_a_new_tensor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "all_reduce", lambda values, *, group: values.mul_(group.size()))
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    assert sum_over_ranks(values, group=Group(1)) is values
    summed = sum_over_ranks(values, group=Group(2))
    summed.backward(torch.tensor([3.0, 5.0]))
    assert (summed.tolist(), values.tolist()) == ([2.0, 4.0], [1.0, 2.0])
    assert values.grad is not None
    assert values.grad.tolist() == [3.0, 5.0]
