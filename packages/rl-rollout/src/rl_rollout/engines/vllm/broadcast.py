"""The workers' side of weights over the network, as a backend of vLLM's own weight-transfer API.

vLLM's NCCL backend has no deadline, computes no checksum, and does not exist on CPUs. This one is registered beside it
and takes the same calls: init, start, update, finish.
"""

from collections.abc import Iterator
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

from rl_core.weights import Broadcast, tensor_checksum
from rl_core.weights.broadcast import BroadcastGroup, TensorSpec
from rl_rollout.engines.vllm.mixtures import before_reload, noted

BACKEND = "rl-buckets"


@dataclass
class JoinRequest(WeightTransferInitInfo):  # type: ignore[misc] # vLLM is not typed
    """How a worker meets the sender.

    Attributes:
        meeting: Where.
        engine: Name of the engine, hence of the group.
    """

    meeting: Broadcast
    engine: str


@dataclass
class ReceiveRequest(WeightTransferUpdateInfo):  # type: ignore[misc] # vLLM is not typed
    """What comes.

    Attributes:
        specs: All tensors, in order.
        tied: Names among them that the model serves from another tensor.
        version: Of the policy.
    """

    specs: list[TensorSpec]
    tied: list[str]
    version: int


class BucketReceiver(WeightTransferEngine[JoinRequest, ReceiveRequest]):  # type: ignore[misc] # vLLM is not typed
    """One worker's end of a `BroadcastGroup`.

    Attributes:
        arrived: Checksum of each tensor of the last update as it arrived, by Hugging Face name.
        joined: Whom it has met, and as which engine.
    """

    init_info_cls = JoinRequest
    update_info_cls = ReceiveRequest

    def __init__(self, *args: Any) -> None:
        """As vLLM makes it."""
        super().__init__(*args)
        self._group: BroadcastGroup | None = None
        self.arrived: dict[str, str] = {}
        self.joined: tuple[Broadcast, str] | None = None

    def init_transfer_engine(self, init_info: JoinRequest) -> None:
        """Meet the sender, in place of the last one."""
        self.shutdown()
        rank, size = self.parallel_config.rank + 1, self.parallel_config.world_size + 1
        self._group = BroadcastGroup(init_info.meeting, init_info.engine, rank=rank, size=size, device=self.device)
        self.joined = init_info.meeting, init_info.engine

    def start_weight_update(self) -> None:
        """Let vLLM load layer by layer."""
        before_reload(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive everything; CPUs have nothing to synchronize."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ReceiveRequest) -> None:
        """Load each tensor as it is whole."""
        self.model.load_weights(noted(self.model, self.arriving(update_info)))

    def finish_weight_update(self) -> None:
        """Finish the layers."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = self.joined = None

    def arriving(self, request: ReceiveRequest) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as it is whole."""
        if self._group is None:
            raise RuntimeError("the worker has not met the sender of weights; init_transfer_engine comes first.")
        self.arrived = {}
        for name, tensor in self._group.receive(request.specs):
            self.arrived[name] = tensor_checksum(tensor, "crc32c")
            if name not in request.tied:
                yield name, tensor


def receive_all(worker: Any, meeting: Broadcast, engine: str, request: ReceiveRequest) -> dict[str, str]:
    """Take one update of all weights by vLLM's calls; see `_receiver`.

    Returns:
        crc32c of each tensor as this worker got it.
    """
    receiver = _receiver(worker, meeting, engine)
    worker.start_weight_update()
    worker.update_weights({"specs": request.specs, "tied": request.tied, "version": request.version})
    worker.finish_weight_update()
    return receiver.arrived


def receive_tensors(worker: Any, meeting: Broadcast, engine: str, request: ReceiveRequest) -> dict[str, torch.Tensor]:
    """Take tensors that are not the model's own, such as an adapter's."""
    return dict(_receiver(worker, meeting, engine).arriving(request))


def _receiver(worker: Any, meeting: Broadcast, engine: str) -> BucketReceiver:
    """The worker's receiver, which has met the sender.

    Args:
        worker: vLLM's.
        meeting: Where the sender is.
        engine: Name of the engine; with another one, or elsewhere, the worker meets the sender anew.
    """
    receiver = worker.weight_transfer_engine
    if not isinstance(receiver, BucketReceiver):
        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)
        model = worker.model_runner.get_model()
        config = WeightTransferConfig(backend=BACKEND)
        receiver = WeightTransferEngineFactory.create_engine(config, worker.vllm_config, worker.device, model)
        worker.weight_transfer_engine = receiver
    if receiver.joined != (meeting, engine):
        worker.init_weight_transfer_engine({"meeting": meeting, "engine": engine})
    found: BucketReceiver = receiver
    return found
