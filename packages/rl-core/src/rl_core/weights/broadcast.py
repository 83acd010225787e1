"""Weights over the network: TCP between CPUs, NCCL between GPUs.

A `BroadcastTransport` sends whole tensors from one process. If a learner has several ranks, each rank can send its own
shards with a `RankSender` (`DirectTransport`), so that no process holds the whole model. Engines request either kind
with `WeightSources`; their workers receive with `SourceGroups`, which assemble the shards.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl_core.weights.broadcast_group import BroadcastGroup, TensorSpec
from rl_core.weights.digests import digest_tensors
from rl_core.weights.offers import HeldRectangle, RankOffer, RankSender, join_offers
from rl_core.weights.receiving import (
    JoinedSource,
    ReceivePlan,
    SourceGroups,
    WeightSources,
    receive_plan,
)
from rl_core.weights.sender import SenderOptions, WeightSender
from rl_core.weights.update import AdapterUpdate, FromSenders, NamedTensors, Rectangle, WeightSource, WeightUpdate

__all__ = [
    "BroadcastGroup",
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
    """Sends whole tensors in buckets to engines in other processes and on other machines.

    The tensors are copied to host memory, so that a restarted engine can load them after the learner's next step.
    """

    def __init__(self, options: SenderOptions | None = None, **others: Any) -> None:
        """Start listening.

        Args:
            options: Options of the sender.
            others: Individual fields that override the options.

        Raises:
            SettingsError: This machine does not have the address, or an option is unknown.
        """
        super().__init__(replace(options or SenderOptions(), **others))

    def pack(
        self, tensors: NamedTensors, *, version: int, tied: Mapping[str, str], adapter: AdapterUpdate | None = None
    ) -> WeightUpdate:
        """See `WeightTransport.pack`; engines still loading the last update have until the deadline to finish."""
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        digests = digest_tensors(copies)
        self.offer(version, copies.values)
        whole = [Rectangle(name, (0,) * len(digest.shape), digest.shape) for name, digest in digests.items()]
        source = WeightSource(sender="the sender of weights", meeting=self.meeting, rectangles=whole)
        location = FromSenders(sources=[source])
        return WeightUpdate(version=version, digests=digests, location=location, tied=dict(tied), adapter=adapter)


class DirectTransport:
    """Lets each rank of a learner send its own shards, so that no process holds the whole model.

    A learner that supports it makes its ranks offer their weights (`RankSender`). Packed updates, such as a small
    adapter, are sent by a `BroadcastTransport` over TCP.
    """

    def __init__(self, options: SenderOptions) -> None:
        """Set how ranks send; each chooses its own backend and address. Nothing listens yet."""
        self.options = options
        self._whole: BroadcastTransport | None = None

    def pack(
        self, tensors: NamedTensors, *, version: int, tied: Mapping[str, str], adapter: AdapterUpdate | None = None
    ) -> WeightUpdate:
        """See `WeightTransport.pack`."""
        if self._whole is None:
            self._whole = BroadcastTransport(self.options, backend="tcp")
        return self._whole.pack(tensors, version=version, tied=tied, adapter=adapter)

    def expect(self, num_receivers: int) -> None:
        """Set the number of expected engines; ranks receive it with the next offer."""
        self.options = replace(self.options, num_receivers=num_receivers)
        if self._whole is not None:
            self._whole.expect(num_receivers)

    def close(self) -> None:
        """See `WeightTransport.close`; the ranks' senders close with their ranks."""
        if self._whole is not None:
            self._whole.close()
