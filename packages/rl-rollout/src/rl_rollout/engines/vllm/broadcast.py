"""The workers' side of weights over the network, as a backend of vLLM's weight-transfer API.

vLLM's NCCL backend has no deadline, computes no checksum, and does not support CPUs. This backend is registered in
addition, and has the same calls: init, start, update, finish.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rl_core.weights import PassingChecksums
from rl_core.weights.broadcast import JoinedSource, ReceivePlan, SourceGroups
from rl_rollout.engines.vllm.mixtures import before_reload, noted

BACKEND = "rl-buckets"


@dataclass
class JoinRequest(WeightTransferInitInfo):  # type: ignore[misc] # vLLM is not typed
    """How a worker connects to the senders.

    Attributes:
        sources: Address of each sender, and this engine's name there.
    """

    sources: list[JoinedSource]


@dataclass
class ReceiveRequest(WeightTransferUpdateInfo):  # type: ignore[misc] # vLLM is not typed
    """The tensors to receive.

    Attributes:
        plan: Tensors, and their senders.
    """

    plan: ReceivePlan


class BucketReceiver(WeightTransferEngine[JoinRequest, ReceiveRequest]):  # type: ignore[misc] # vLLM is not typed
    """One worker's end of the connections to all senders.

    Attributes:
        arrived: Checksum of each tensor of the last update as it arrived, by Hugging Face name.
        joined: The connected senders, and this engine's name there.
    """

    init_info_cls = JoinRequest
    update_info_cls = ReceiveRequest

    def __init__(self, *args: Any) -> None:
        """Create the receiver the way vLLM does."""
        super().__init__(*args)
        self._groups: SourceGroups | None = None
        self.arrived: dict[str, str] = {}
        self.joined: list[JoinedSource] = []

    def init_transfer_engine(self, init_info: JoinRequest) -> None:
        """Connect to the senders, and disconnect from the last ones."""
        self.shutdown()
        rank, size = self.parallel_config.rank + 1, self.parallel_config.world_size + 1
        self._groups = SourceGroups(init_info.sources, rank=rank, size=size, device=self.device)
        self.joined = list(init_info.sources)

    def start_weight_update(self) -> None:
        """Make vLLM load layer by layer."""
        before_reload(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive everything. CPUs need no synchronization."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ReceiveRequest) -> None:
        """Load each tensor when it is complete."""
        self.model.load_weights(noted(self.model, self.arriving(update_info)))

    def finish_weight_update(self) -> None:
        """Finish the layers."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Disconnect from the senders."""
        if self._groups is not None:
            self._groups.close()
            self._groups, self.joined = None, []

    def arriving(self, request: ReceiveRequest) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor when it is complete."""
        if self._groups is None:
            raise RuntimeError("the worker is not connected to a sender of weights; call init_transfer_engine first.")
        self.arrived, plan = {}, request.plan
        with PassingChecksums(plan.kinds) as sums:
            for name, tensor in sums.passing(self._groups.receive(plan)):
                if name not in plan.tied:
                    yield name, tensor
            self.arrived = sums.result()


def receive_all(worker: Any, sources: Sequence[JoinedSource], plan: ReceivePlan) -> dict[str, str]:
    """Receive one update of all weights with vLLM's calls. See `_receiver`.

    Returns:
        Checksum of each tensor as this worker received it.
    """
    receiver = _receiver(worker, sources)
    worker.start_weight_update()
    worker.update_weights({"plan": plan})
    worker.finish_weight_update()
    return receiver.arrived


def receive_tensors(worker: Any, sources: Sequence[JoinedSource], plan: ReceivePlan) -> dict[str, torch.Tensor]:
    """Receive tensors that are not the model's own, such as an adapter's."""
    return dict(_receiver(worker, sources).arriving(ReceiveRequest(plan=plan)))


def _receiver(worker: Any, sources: Sequence[JoinedSource]) -> BucketReceiver:
    """Return the worker's receiver, connected to the senders.

    Args:
        worker: vLLM's worker.
        sources: The senders. Reconnects if these, or this engine's name there, have changed.
    """
    receiver = worker.weight_transfer_engine
    if not isinstance(receiver, BucketReceiver):
        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)
        model = worker.model_runner.get_model()
        config = WeightTransferConfig(backend=BACKEND)
        receiver = WeightTransferEngineFactory.create_engine(config, worker.vllm_config, worker.device, model)
        worker.weight_transfer_engine = receiver
    if receiver.joined != list(sources):
        worker.init_weight_transfer_engine({"sources": list(sources)})
    found: BucketReceiver = receiver
    return found
