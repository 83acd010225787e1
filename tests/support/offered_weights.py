"""Weights offered by several senders, and an engine that loads them; workers are threads of this process."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from rl_core.weights.broadcast import (
    HeldRectangle,
    ReceivePlan,
    SenderOptions,
    SourceGroups,
    WeightSender,
    WeightSources,
    join_offers,
    offer_from_rank,
)
from rl_core.weights.digests import tensor_checksum
from rl_core.weights.update import Rectangle, WeightUpdate

CPU = torch.device("cpu")


class OfferedTo:
    """An engine with several workers."""

    def __init__(self, num_workers: int = 1) -> None:
        ranks = range(1, num_workers + 1)
        self.groups = [SourceGroups(rank=rank, num_workers=num_workers, device=CPU) for rank in ranks]
        self.sources = WeightSources(self.ask)

    def ask(self, plan: ReceivePlan) -> list[str | None]:
        with ThreadPoolExecutor(len(self.groups)) as threads:
            return list(threads.map(lambda group: group.ask(plan), self.groups))

    def take(
        self, update: WeightUpdate, *, each: Callable[[str], object] = lambda _: None
    ) -> list[dict[str, torch.Tensor]]:
        plan = self.sources.announce(update)

        def work(group: SourceGroups) -> dict[str, torch.Tensor]:
            found = {}
            for name, tensor in group.receive(plan):
                each(name)
                found[name] = tensor
            return found

        with ThreadPoolExecutor(len(self.groups)) as threads:
            return list(threads.map(work, self.groups))

    def close(self) -> None:
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
        self.senders = [WeightSender(f"rank {rank} of the learner") for rank in range(2)]

    def pack(
        self, tensors: Mapping[str, torch.Tensor], *, version: int, tied: Mapping[str, str], adapter: None = None
    ) -> WeightUpdate:
        offers = [
            offer_from_rank(sender, held_by(rank, tensors), self.options, version=version)
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
