"""Weights over the network: TCP between CPUs, NCCL between GPUs. One sender has all tensors, or each has rectangles.

A `BroadcastTransport` sends whole tensors from one process. Where a learner has several ranks, each can send what it
holds by a `WeightSender` of its own: then no process has the whole model. Engines ask for either by `WeightSources`, and
their workers take it by `SourceGroups`, which put rectangles together.
"""

from collections.abc import Mapping
from typing import Literal

import torch

from rl_core.weights.broadcast_group import BroadcastGroup, TensorSpec
from rl_core.weights.receiving import BroadcastReceiver, ReceivePlan, SourceGroups, WeightSources, receive_plan
from rl_core.weights.sender import DEFAULT_BUCKET_BYTES, SenderOptions, WeightSender
from rl_core.weights.update import AdapterUpdate, WeightUpdate, digest_tensors

__all__ = [
    "BroadcastGroup",
    "BroadcastReceiver",
    "BroadcastTransport",
    "ReceivePlan",
    "SenderOptions",
    "SourceGroups",
    "TensorSpec",
    "WeightSender",
    "WeightSources",
    "receive_plan",
]


class BroadcastTransport(WeightSender):
    """Sends whole tensors to engines in other processes and on other machines, in buckets.

    The tensors are copied to this process's memory: an engine that is started again takes them later, when the learner
    has stepped on.
    """

    def __init__(
        self,
        *,
        backend: Literal["tcp", "gloo", "nccl"] = "tcp",
        host: str = "127.0.0.1",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = 60.0,
        num_receivers: int | None = None,
    ) -> None:
        """Listen; the arguments are those of `SenderOptions`.

        Raises:
            SettingsError: This machine has no such address.
        """
        super().__init__(
            SenderOptions(
                backend=backend,
                host=host,
                bucket_bytes=bucket_bytes,
                deadline_s=deadline_s,
                num_receivers=num_receivers,
            )
        )

    def pack(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        tied: Mapping[str, str],
        adapter: AdapterUpdate | None = None,
    ) -> WeightUpdate:
        """See `WeightTransport.pack`; engines that still take the last update have the deadline to end that."""
        digests = digest_tensors(tensors)
        self.offer(version, [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors.values()])
        return WeightUpdate(version=version, digests=digests, broadcast=self.meeting, tied=dict(tied), adapter=adapter)
