"""Weights offered by several senders, and an engine that loads them; workers are threads of this process."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_core.weights.broadcast import (
    HeldRectangle,
    JoinedSource,
    RankSender,
    SenderOptions,
    SourceGroups,
    WeightSources,
    join_offers,
    receive_plan,
)
from rl_core.weights.digests import tensor_checksum
from rl_core.weights.update import Rectangle, WeightUpdate

CPU = torch.device("cpu")


class OfferedTo:
    """An engine with several workers."""

    def __init__(self, num_workers: int = 1) -> None:
        self.sources = WeightSources(num_workers=num_workers)
        self.num_workers = num_workers
        self.groups: list[SourceGroups] = []

    def take(
        self, update: WeightUpdate, *, each: Callable[[str], None] = lambda _: None
    ) -> list[dict[str, torch.Tensor]]:
        joined, plan = self.sources.announce(update), receive_plan(update)
        self._meet(joined)
        found: list[Any] = [None] * self.num_workers

        def work(rank: int) -> None:
            try:
                found[rank] = {}
                for name, tensor in self.groups[rank].receive(plan):
                    each(name)
                    found[rank][name] = tensor
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.num_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    def _meet(self, joined: list[JoinedSource]) -> None:
        if self.groups and self.groups[0].sources == joined:
            return
        for group in self.groups:
            group.close()
        size = self.num_workers + 1
        self.groups = [SourceGroups(joined, rank=rank, size=size, device=CPU) for rank in range(1, size)]

    def close(self) -> None:
        self.sources.close()
        for group in self.groups:
            group.close()


def held(tensor: torch.Tensor, rectangle: Rectangle) -> HeldRectangle:
    place = tuple(slice(o, o + s) for o, s in zip(rectangle.offsets, rectangle.sizes, strict=True))
    read = lambda: tensor[place].contiguous()
    return HeldRectangle(rectangle=rectangle, shape=tuple(tensor.shape), read=read)


class TwoRanks:
    """A transport that acts as a learner with two tensor-parallel ranks: each sends half of every matrix."""

    def __init__(self, options: SenderOptions) -> None:
        self.options = options
        self.senders = [RankSender(f"rank {rank} of the learner") for rank in range(2)]

    def pack(
        self, tensors: Mapping[str, torch.Tensor], *, version: int, tied: Mapping[str, str], adapter: None = None
    ) -> WeightUpdate:
        offers = [
            sender.offer(held_by(rank, tensors), self.options, version=version)
            for rank, sender in enumerate(self.senders)
        ]
        return join_offers(offers, tensors, version=version, tied=tied)

    def close(self) -> None:
        """Do nothing: one learner sends all updates, but a suite closes its transport after each."""

    def end(self) -> None:
        for sender in self.senders:
            sender.close()


def held_by(rank: int, tensors: Mapping[str, torch.Tensor]) -> list[HeldRectangle]:
    """Return a rank's halves of matrices, as megatron splits them, and on the first rank all vectors."""
    found = []
    for name, tensor in tensors.items():
        axis = int(name.endswith(("o_proj.weight", "down_proj.weight")))
        if tensor.ndim > 1:
            sizes, offsets = list(tensor.shape), [0] * tensor.ndim
            half = sizes[axis] // 2
            offsets[axis], sizes[axis] = rank * half, half + rank * (sizes[axis] % 2)
            found.append(held(tensor, Rectangle(name, tuple(offsets), tuple(sizes))))
        elif rank == 0:
            found.append(held(tensor, Rectangle(name, (0,), tuple(tensor.shape))))
    return found


def assert_offered(
    found: Mapping[str, torch.Tensor], update: WeightUpdate, expected: Mapping[str, torch.Tensor]
) -> None:
    """Check that the received tensors equal the expected ones and the update's, bit for bit."""
    assert list(found) == list(update.digests)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert tensor_checksum(found[name], "sums") == update.digests[name].checksum, name
