"""Weights over the network: TCP between CPUs, NCCL between GPUs.

A sender offers rectangles of tensors. A `BroadcastTransport` is one sender that offers every tensor whole. With a
`DirectTransport`, each rank of a learner has a sender for its own shards (`offer_from_rank`), so that no process holds
the whole model, and `join_offers` makes one update of all offers. Engines request either kind with `WeightSources`;
their workers receive with `SourceGroups`, which assemble the tensors.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl_core.weights.broadcast_group import BroadcastGroup
from rl_core.weights.digests import digest_tensors
from rl_core.weights.offers import RankOffer, join_offers, offer_from_rank
from rl_core.weights.receiving import ReceivePlan, SourceGroups, WeightSources
from rl_core.weights.sender import HeldRectangle, SenderOptions, WeightSender
from rl_core.weights.update import AdapterUpdate, FromSenders, NamedTensors, WeightUpdate

__all__ = [
    "BroadcastGroup",
    "BroadcastTransport",
    "DirectTransport",
    "HeldRectangle",
    "RankOffer",
    "ReceivePlan",
    "SenderOptions",
    "SourceGroups",
    "WeightSender",
    "WeightSources",
    "join_offers",
    "offer_from_rank",
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
        super().__init__()
        self.listen(replace(options or SenderOptions(), **others))

    def pack(
        self, tensors: NamedTensors, *, version: int, tied: Mapping[str, str], adapter: AdapterUpdate | None = None
    ) -> WeightUpdate:
        """See `WeightTransport.pack`; engines still loading the last update have until the deadline to finish."""
        return _offer_whole(self, tensors, version=version, tied=tied, adapter=adapter)


class DirectTransport(WeightSender):
    """Lets each rank of a learner send its own shards, so that no process holds the whole model.

    A learner that supports it makes its ranks offer their weights (`offer_from_rank`). Packed updates, such as a small
    adapter, are broadcast over TCP.
    """

    def __init__(self, options: SenderOptions) -> None:
        """Set how ranks send; each chooses its own backend and address. Nothing listens before the first `pack`."""
        super().__init__()
        self.options = options

    def pack(
        self, tensors: NamedTensors, *, version: int, tied: Mapping[str, str], adapter: AdapterUpdate | None = None
    ) -> WeightUpdate:
        """See `WeightTransport.pack`."""
        self.listen(replace(self.options, backend="tcp"))
        return _offer_whole(self, tensors, version=version, tied=tied, adapter=adapter)

    def expect(self, num_receivers: int) -> None:
        """Set the number of expected engines; ranks receive it with the next offer."""
        self.options = replace(self.options, num_receivers=num_receivers)
        super().expect(num_receivers)


def _offer_whole(
    sender: WeightSender, tensors: NamedTensors, *, version: int, tied: Mapping[str, str], adapter: AdapterUpdate | None
) -> WeightUpdate:
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    digests = digest_tensors(copies)
    source = sender.offer([HeldRectangle.whole(name, copy) for name, copy in copies.items()], version=version)
    location = FromSenders(sources=[source])
    return WeightUpdate(version=version, digests=digests, location=location, tied=dict(tied), adapter=adapter)
