"""Run one rank of a learner in one process, on an accelerator that computes nothing.

torch takes the accelerator for a real one: its tensors have shapes, dtypes and a device, but no values. Those on the
host are real. Collectives do nothing.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import megatron.core.pipeline_parallel.p2p_communication as p2p
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from rl_core.devices import own_device
from rl_distill.megatron import layers, setup
from rl_distill.megatron.any_model.chunk import PACKED, TransformersModel
from rl_distill.megatron.cpu import _Synchronous, install_cpu_compatibility
from rl_distill.megatron.layers import _RMSNormFunction
from rl_distill.megatron.parallel import initialize_groups
from rl_distill.megatron.rank_trainer import RankTrainer
from rl_distill.megatron.setup import ModelPlan, fill_weights
from rl_distill.options import ParallelOptions

PRETEND = "pretend"
aten, c10d = torch.ops.aten, torch.ops.c10d

READS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_dim}
"""Operations that make the host wait for the accelerator; reads and writes by a mask do too."""

BY_INDEX = {aten.index, aten.index_put, aten.index_put_}

COALESCED = {
    c10d.allreduce_coalesced_: 1,
    c10d.allgather_into_tensor_coalesced_: 2,
    c10d.reduce_scatter_tensor_coalesced_: 2,
}
"""Collectives without a fake version in torch, with the position of their group; a barrier replaces them."""


class Place(NamedTuple):
    """A function of this project, or of a library, that reads a value.

    Attributes:
        file: Path of its file from the package's folder.
        function: Its name.
    """

    file: str
    function: str


LISTED = {
    Place("rl_distill/megatron/rank_batches.py", "_numbers"): "once a step: the loss and all metrics in one transfer",
    Place("rl_distill/megatron/rank_batches.py", "_broken"): "only after a loss that is not finite, to name its rows",
    Place("rl_distill/megatron/optimizer.py", "grad_norm"): "once a step: decides if it is taken, and its clipping",
    Place("rl_distill/megatron/any_model/sharded.py", "grad_norm"): "the same of weights that are divided",
    Place("rl_distill/megatron/rank_model.py", "score"): "once a batch, when all of its passes are queued",
    Place("rl_distill/megatron/rank_model.py", "_run"): "once a batch: rerouted rows, if experts are replayed",
    Place("rl_distill/packing.py", "unpack_values"): "once a step, if the caller wants values of tokens",
    Place("rl_distill/megatron/any_model/chunk.py", "_bucket_inputs"): "images of rows that a class computes padded",
    Place("rl_distill/megatron/rank_tensors.py", "export"): "between steps: weights for another process, all of them",
    Place("rl_distill/megatron/rank_tensors.py", "state_pieces"): "between steps: a checkpoint, all of it",
    Place("rl_distill/megatron/convert.py", "write"): "between steps: a new adapter",
    Place("rl_distill/megatron/rank_trainer.py", "of_rank"): "between steps: the copies of an adapter, all of them",
    Place("rl_core/weights/digests.py", "to_host"): "between steps: the digests of all weights in one transfer",
    Place("rl_core/weights/digests.py", "probe_vector_on"): "once for each size of a matrix, then kept",
    Place("megatron/core/transformer/moe/token_dispatcher.py", "dispatch_preprocess"): (
        "ranks that exchange rows of experts must know how many arrive; one rank's dispatcher does not read them"
    ),
}
"""Places that may wait for the accelerator once the model is built, each with its reason."""

RARE = {
    Place("rl_distill/megatron/rank_batches.py", "_broken"),
    Place("rl_distill/megatron/any_model/chunk.py", "_bucket_inputs"),
}
"""Those that no test reaches: numbers here are finite, and rows have no images."""


def reading_place() -> Place:
    """Return the innermost function outside torch on the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        for root in ROOTS:
            if f"/{root}/" in file and not frame.f_code.co_name.startswith("<"):  # of a comprehension
                return Place(root + file.rpartition(f"/{root}")[2], frame.f_code.co_name)
        frame = frame.f_back
    return Place("", "")


ROOTS = ("rl_distill", "rl_core", "megatron/core", "transformers")
"""Folders of the packages that compute."""


class WaitError(AssertionError):
    """The host waits for the accelerator where no reason is listed."""


class Pretending(TorchDispatchMode):
    """Tensors on the accelerator are fake ones, which have no values; those on the host are real.

    An operation on tensors of both raises torch's FakeTensorDeviceMismatchError. Where the host reads a value, a listed
    place gets ones, and any other raises `WaitError`.

    Attributes:
        is_in_step: True once the model is built and its weights are read.
        operations: Names of the operations that ran on the accelerator.
        reads: Listed places that read a value.
        num_dispatched: Number of rows that the all-to-all dispatcher is about to select; None elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.is_in_step, self.operations, self.reads = False, set[str](), set[Place]()
        self.num_dispatched: int | None = None
        self._pinned = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        tensors = list(_tensors((*args, *kwargs.values())))
        held = [one for one in tensors if isinstance(one, FakeTensor)]
        target = kwargs.get("device")
        if packet is aten._pin_memory or kwargs.get("pin_memory"):
            found = args[0].clone() if packet is aten._pin_memory else func(*args, **{**kwargs, "pin_memory": False})
            self._pinned.add(found.untyped_storage().data_ptr())
            return found
        if not held and (target is None or torch.device(target).type != PRETEND):
            return func(*args, **kwargs)
        self.operations.add(str(packet))
        if packet in (aten._to_copy, aten.copy_):
            return self._copy(func, args, kwargs)
        if packet is aten.masked_select and self.num_dispatched is not None:
            return held[0].new_empty(self.num_dispatched)
        if packet in READS or (packet in BY_INDEX and _selects_by_mask(*args)):
            self._read(func, held)
            if packet is aten._local_scalar_dense:
                return torch.ones((), dtype=held[0].dtype).item()
        if packet in COALESCED:
            return c10d.barrier.default(held[0].new_empty(0), args[COALESCED[packet]], [])
        with self._fake:
            return func(*args, **kwargs)

    def dispatch(self, dispatcher: Any, routing_map: torch.Tensor) -> torch.Tensor:
        """Replace megatron's `preprocess`, which reads values; spread rows evenly over experts.

        Args:
            dispatcher: A MoEAlltoAllTokenDispatcher.
            routing_map: [T, experts] bool.

        Returns:
            [experts of this rank] number of rows of each expert, on the CPU.
        """
        ep, tp = dispatcher.ep_size, dispatcher.tp_size
        self._read("preprocess", [routing_map])
        self.num_dispatched = dispatcher.num_out_tokens = len(routing_map) * dispatcher.config.moe_router_topk
        places = torch.arange(self.num_dispatched) % dispatcher.num_experts
        counts = torch.bincount(places, minlength=dispatcher.num_experts)
        own = counts[dispatcher.local_expert_indices]
        dispatcher.input_splits = counts.view(ep, -1).sum(1).numpy()
        dispatcher.output_splits = np.full(ep, int(own.sum()))
        dispatcher.output_splits_tp = np.full(tp, int(own.sum()) * ep)
        dispatcher.num_global_tokens_per_local_expert = own.repeat(tp * ep, 1)
        return (own * tp * ep).pin_memory()

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy between host and accelerator, or within the latter."""
        is_new = func.overloadpacket is aten._to_copy
        source = args[0] if is_new else args[1]
        target = torch.device(kwargs.get("device") or source.device) if is_new else args[0].device
        is_blocking = not (kwargs.get("non_blocking") or (not is_new and True in args[2:]))
        if source.device.type == "cpu":  # the host continues only if the memory stays as it is
            is_blocking |= source.untyped_storage().data_ptr() not in self._pinned
        if source.device != target and is_blocking and source.ndim + source.numel() > 1:
            self._read(func, [source])
        if not is_new:
            return args[0] if isinstance(args[0], FakeTensor) else args[0].copy_(torch.ones((), dtype=source.dtype))
        dtype = kwargs.get("dtype") or source.dtype
        if target.type == "cpu":
            found = torch.ones(source.shape, dtype=dtype)
            if kwargs.get("non_blocking"):
                self._pinned.add(found.untyped_storage().data_ptr())
            return found
        with self._fake:
            return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=target)

    def _read(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """Raise an error unless the place that reads is listed."""
        place = reading_place()
        if not self.is_in_step:
            return
        if place not in LISTED:
            raise WaitError(f"{func} of {[list(one.shape) for one in tensors]} waits for the accelerator at {place}")
        self.reads.add(place)


def _selects_by_mask(_self: Any, indices: list[Any], values: torch.Tensor | None = None, *_: Any) -> bool:
    """Return True if the number of selected elements depends on values; `masked_fill` writes a single value."""
    is_one = values is not None and values.numel() == 1
    return not is_one and any(one is not None and one.dtype == torch.bool for one in indices)


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def become_rank(rank: int, parallel: ParallelOptions) -> None:
    """Make this process a rank of a layout; call it again to change the rank or the layout."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=parallel.ranks)
    initialize_groups(parallel, seed=0)


class _Module(_DummyBackendModule):
    """`torch.pretend`."""

    Stream = Event = _Synchronous

    def current_stream(self, _device: object = None) -> _Synchronous:
        return _Synchronous()

    def stream(self, _stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_rng_state(self, _device: object = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, _state: torch.Tensor, _device: object = None) -> None:
        pass


def install() -> None:
    """Give this process the accelerator."""
    _setup_privateuseone_for_python_backend(PRETEND, _Module())
    dist.Backend.register_backend("fake", fake_pg._create_fake_pg, extended_api=True, devices=["cpu", PRETEND])
    install_cpu_compatibility()
    torch.autograd.set_multithreading_enabled(False)  # its thread has no Python frames of this one


@contextlib.contextmanager
def pretending(*, length: int, hidden_size: int) -> Iterator[Pretending]:
    """Within this context, build models on the accelerator and watch their steps.

    Args:
        length: Number of tokens of each micro-batch on a rank, which pipeline stages would otherwise exchange.
        hidden_size: Hidden size of the model.
    """
    mode = Pretending()
    dispatch_preprocess = MoEAlltoAllTokenDispatcher.dispatch_preprocess

    def shapes(*_: Any, **__: Any) -> tuple[list[int], list[int]]:
        return [length, 1, hidden_size], [length, 1, hidden_size]

    def dispatch(dispatcher: Any, *args: Any) -> Any:
        try:
            return dispatch_preprocess(dispatcher, *args)
        finally:
            mode.num_dispatched = None

    watching = (
        (MoEAlltoAllTokenDispatcher, "preprocess", lambda *args: mode.dispatch(*args)),
        (MoEAlltoAllTokenDispatcher, "dispatch_preprocess", dispatch),
        (p2p.P2PCommunicator, "_communicate_shapes", shapes),
        # On a GPU, the norm saves its input and the rows' norms, like ours; torch's fallback elsewhere saves more.
        (F, "rms_norm", lambda x, _, weight, eps: _RMSNormFunction.apply(x, weight, eps)),
        (torch.utils, "swap_tensors", _set_data),
        (torch.accelerator, "synchronize", lambda _device=None: mode._read("synchronize", [])),
        (torch.accelerator, "empty_cache", lambda: None),
        (layers, "can_compile", lambda _: False),
    )
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor then makes a tensor on the host and copies it
    try:
        with replaced(*watching), mode:
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _set_data(of_module: torch.Tensor, converted: torch.Tensor) -> None:
    """Convert a module's parameter in place, as for real tensors; torch swaps fake ones, which the mode refers to."""
    of_module.data = converted


@contextlib.contextmanager
def replaced(*values: tuple[Any, str, Any]) -> Iterator[None]:
    """Within this context, replace attributes, given as (owner, name, value)."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    for owner, name, value in values:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class StepMemory(MemTracker):
    """Track memory with torch's tracker, but not a module's buffers: megatron's modules have no usable `buffers`."""

    def _track_module_params_and_buffers(self, *_: Any, **__: Any) -> tuple[int, int]:
        return 0, 0


def peak_memory(model: RankTrainer, step: Callable[[], Any]) -> int:
    """Return the most bytes on the accelerator at once during a step, measured with torch's tracker.

    Args:
        model: Its persistent tensors exist before the step.
        step: Runs a whole step.
    """
    tracker = StepMemory()
    tracker.track_external(*chain(*model.tensors.kept()))
    with tracker:
        step()
    peak: int = tracker.get_tracker_snapshot("peak")[own_device()]["Total"]
    return peak


def build(plan: ModelPlan, *, is_large: bool = False, is_packed: bool = True) -> RankTrainer:
    """Build this rank's part of a model.

    Args:
        plan: The model to build.
        is_large: Create no random weights, which would fill the host's memory one after the other.
        is_packed: How a model of transformers computes its rows; trying the ways needs values.
    """

    def settle(model: TransformersModel, *_: Any) -> None:
        model._name_of_layers = model._find_layers()
        model._use(PACKED if is_packed else "sdpa", is_packed=is_packed)
        model.shares_prefixes = is_packed

    def on_accelerator(*args: Any, **kwargs: Any) -> TransformersModel:
        with own_device():
            return TransformersModel(*args, **kwargs)

    large = [(setup, "random_tensor", _without_memory)] if is_large else []
    ways = (TransformersModel, "settle", settle), (setup, "TransformersModel", on_accelerator)
    with replaced((setup, "fill_weights", _fill_weights), *ways, *large):
        return RankTrainer(plan)


def _fill_weights(model: torch.nn.Module, *args: Any) -> None:
    """Call the learner's `fill_weights` after checking that the model was never in the host's memory."""
    places = {parameter.device for parameter in model.parameters()}
    assert places == {own_device()}, f"built on {places}"
    fill_weights(model, *args)


def _without_memory(name: str, shape: tuple[int, ...], plan: ModelPlan) -> torch.Tensor:
    return torch.empty(shape, device=own_device())
