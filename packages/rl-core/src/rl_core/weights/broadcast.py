"""Weights over the network: TCP between CPUs, NCCL between GPUs. One sender has all tensors, or each has rectangles.

A `BroadcastTransport` sends whole tensors from one process. Where a learner has several ranks, each can send what it
holds by a `RankSender` of its own (`DirectTransport`): then no process has the whole model. Engines ask for either by
`WeightSources`, and their workers take it by `SourceGroups`, which put rectangles together.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rl_core.weights.broadcast_group import BroadcastGroup, TensorSpec
from rl_core.weights.digests import digest_tensors
from rl_core.weights.offers import HeldRectangle, RankOffer, RankSender, join_offers
from rl_core.weights.receiving import (
    BroadcastReceiver,
    JoinedSource,
    ReceivePlan,
    SourceGroups,
    WeightSources,
    receive_plan,
)
from rl_core.weights.sender import SenderOptions, WeightSender
from rl_core.weights.update import AdapterUpdate, WeightUpdate

__all__ = [
    "BroadcastGroup",
    "BroadcastReceiver",
    "BroadcastTransport",
    "DirectTransport",
    "HeldRectangle",
    "JoinedSource",
    "RankOffer",
    "RankSender",
    "ReceivePlan",
    "SenderOptions",
    "SourceGroups",
    "TensorSpec",
    "WeightSender",
    "WeightSources",
    "join_offers",
    "receive_plan",
]


class BroadcastTransport(WeightSender):
    """Sends whole tensors to engines in other processes and on other machines, in buckets.

    The tensors are copied to this process's memory: an engine that is started again takes them later, when the learner
    has stepped on.
    """

    def __init__(self, options: SenderOptions | None = None, **others: Any) -> None:
        """Listen.

        Args:
            options: How it sends.
            others: Fields of the options that differ.

        Raises:
            SettingsError: This machine has no such address, or a value is none of the options'.
        """
        super().__init__(replace(options or SenderOptions(), **others))

    def pack(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        tied: Mapping[str, str],
        adapter: AdapterUpdate | None = None,
    ) -> WeightUpdate:
        """See `WeightTransport.pack`; engines that still take the last update have the deadline to end that."""
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        digests = digest_tensors(copies)
        self.offer(version, list(copies.values()))
        return WeightUpdate(version=version, digests=digests, broadcast=self.meeting, tied=dict(tied), adapter=adapter)


class DirectTransport:
    """Has each rank of a learner send what it holds, so that no process has the whole model.

    A learner that knows it has its ranks offer their weights (`RankSender`). What is packed, such as an adapter, which
    is small, goes through a `BroadcastTransport` over TCP.
    """

    def __init__(self, options: SenderOptions) -> None:
        """Say how ranks send; each finds its own backend and address. Nothing listens yet."""
        self.options = options
        self._whole: BroadcastTransport | None = None

    def pack(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        tied: Mapping[str, str],
        adapter: AdapterUpdate | None = None,
    ) -> WeightUpdate:
        """See `WeightTransport.pack`."""
        if self._whole is None:
            self._whole = BroadcastTransport(self.options, backend="tcp")
        return self._whole.pack(tensors, version=version, tied=tied, adapter=adapter)

    def expect(self, num_receivers: int) -> None:
        """Change how many engines are expected; ranks hear of it with the next offer."""
        self.options = replace(self.options, num_receivers=num_receivers)
        if self._whole is not None:
            self._whole.expect(num_receivers)

    def close(self) -> None:
        """See `WeightTransport.close`; the ranks' senders end with them."""
        if self._whole is not None:
            self._whole.close()
