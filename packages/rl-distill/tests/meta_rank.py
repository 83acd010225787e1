"""Run one rank of a GPU learner in one process: tensors are on the meta device, and collectives do nothing.

Shapes, dtypes, devices and branches are those of a GPU. Tensors have no values: numbers that the learner reads between
its passes are ones, and reading a number within a pass is an error.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import megatron.core.pipeline_parallel.p2p_communication as p2p
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import adam
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from rl_distill.megatron import rank_model, setup
from rl_distill.megatron.layers import _RMSNormFunction
from rl_distill.megatron.parallel import initialize_groups
from rl_distill.megatron.rank_trainer import RankTrainer
from rl_distill.megatron.setup import ModelPlan, fill_weights
from rl_distill.options import ParallelOptions

META = torch.device("meta")
aten, c10d = torch.ops.aten, torch.ops.c10d

WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_dim}
"""Operations that make the host wait for the GPU; reads and writes by a mask do too."""

BY_INDEX = {aten.index, aten.index_put, aten.index_put_}


COALESCED = {
    c10d.allreduce_coalesced_: 1,
    c10d.allgather_into_tensor_coalesced_: 2,
    c10d.reduce_scatter_tensor_coalesced_: 2,
}
"""Collectives without a fake version in torch, with the position of their group; a barrier replaces them."""


class WaitError(AssertionError):
    """Within a pass, the host waits for the GPU, or an operation mixes tensors of both."""


class AsOnGpu(TorchDispatchMode):
    """Raise an error if the host waits for the GPU within a pass; between passes, return ones for the values it reads.

    Attributes:
        is_in_pass: True within megatron's schedule.
        operations: Names of the operations that ran on the GPU.
        num_dispatched: Number of rows that the all-to-all dispatcher is about to select, a wait that is allowed; None
            elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_in_pass, self.operations = False, set[str]()
        self.num_dispatched: int | None = None

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """Mark a forward or backward pass."""
        self.is_in_pass = True
        try:
            yield
        finally:
            self.is_in_pass = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        on_gpu = [one for one in tensors if one.device.type == "meta"]
        packet = func.overloadpacket
        if on_gpu:
            self.operations.add(str(packet))
        if packet in (aten._to_copy, aten.copy_):
            self._check_copy(func, tensors, kwargs)
        elif on_gpu and any(one.device.type != "meta" and one.ndim for one in tensors):
            raise WaitError(f"{func} of tensors on {[str(one.device) for one in tensors]}")
        if packet is aten.masked_select and self.num_dispatched is not None:
            return on_gpu[0].new_empty(self.num_dispatched)
        if on_gpu and (packet in WAITS or (packet in BY_INDEX and _selects_by_mask(*args))):
            if self.is_in_pass:
                raise WaitError(f"{func} of {[list(one.shape) for one in on_gpu]} waits for the GPU")
            if packet is aten._local_scalar_dense:
                return torch.ones((), dtype=on_gpu[0].dtype).item()
        if on_gpu and packet is aten._to_copy and torch.device(kwargs.get("device") or META).type == "cpu":
            return torch.ones((), dtype=kwargs.get("dtype") or on_gpu[0].dtype).expand(on_gpu[0].shape)
        if packet in COALESCED:
            return c10d.barrier.default(torch.empty(0, device=META), args[COALESCED[packet]], [])
        return func(*args, **kwargs)

    def dispatch(self, dispatcher: Any, routing_map: torch.Tensor) -> torch.Tensor:
        """Replace megatron's `preprocess`, which reads values that meta tensors lack; spread rows evenly over experts.

        Args:
            dispatcher: A MoEAlltoAllTokenDispatcher.
            routing_map: [T, experts] bool.

        Returns:
            [experts of this rank] number of rows of each expert, on the CPU.
        """
        ep, tp = dispatcher.ep_size, dispatcher.tp_size
        self.num_dispatched = dispatcher.num_out_tokens = len(routing_map) * dispatcher.config.moe_router_topk
        places = torch.arange(self.num_dispatched) % dispatcher.num_experts
        counts = torch.bincount(places, minlength=dispatcher.num_experts)
        own = counts[dispatcher.local_expert_indices]
        dispatcher.input_splits = counts.view(ep, -1).sum(1).numpy()
        dispatcher.output_splits = np.full(ep, int(own.sum()))
        dispatcher.output_splits_tp = np.full(tp, int(own.sum()) * ep)
        dispatcher.num_global_tokens_per_local_expert = own.repeat(tp * ep, 1)
        return own * tp * ep

    def _check_copy(self, func: Any, tensors: list[torch.Tensor], kwargs: Any) -> None:
        """Raise an error if a copy between host and GPU blocks within a pass."""
        source, target = tensors[-1].device, torch.device(kwargs.get("device") or tensors[0].device)
        if self.is_in_pass and source != target and not kwargs.get("non_blocking"):
            raise WaitError(f"{func} of {list(tensors[-1].shape)} from {source} to {target} waits")


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
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.ranks)
    initialize_groups(parallel, seed=0)


@contextlib.contextmanager
def as_on_gpu(*, length: int, hidden_size: int) -> Iterator[AsOnGpu]:
    """Within this context, build models on the meta device and watch their steps.

    Args:
        length: Number of tokens of each micro-batch on a rank, which pipeline stages would otherwise exchange.
        hidden_size: Hidden size of the model.
    """
    mode, schedule = AsOnGpu(), rank_model.get_forward_backward_func
    dispatch_preprocess = MoEAlltoAllTokenDispatcher.dispatch_preprocess

    def watched() -> Callable[..., Any]:
        def run(**kwargs: Any) -> Any:
            with mode.in_pass():
                return schedule()(**kwargs)

        return run

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
        (rank_model, "get_forward_backward_func", watched),
        (p2p.P2PCommunicator, "_communicate_shapes", shapes),
        # On a GPU, the norm saves its input and the rows' norms, like ours; torch's fallback elsewhere saves more.
        (F, "rms_norm", lambda x, _, weight, eps: _RMSNormFunction.apply(x, weight, eps)),
        (adam, "_device_dtype_check_for_fused", lambda *_, **__: None),  # its list of devices has no meta
    )
    with replaced(*watching), mode:
        yield mode


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


def step_memory(model: RankTrainer, objective: Any, step: Callable[[Any], Any]) -> dict[str, int]:
    """Return the bytes of everything on the GPU, measured with torch's tracker.

    Args:
        model: Its persistent tensors exist before the step.
        objective: Called between the passes.
        step: Runs a whole step with the objective it gets.

    Returns:
        Bytes "between passes" of the last micro-batch, and at the "peak", with the working memory of head and layers.
    """
    tracker, found = StepMemory(), dict[str, int]()
    tracker.track_external(*chain(*model.tensors.kept()))

    def noting(*args: Any) -> Any:
        found["between passes"] = tracker.get_tracker_snapshot("current")[META]["Total"]
        return objective(*args)

    with tracker:
        step(noting)
    return found | {"peak": tracker.get_tracker_snapshot("peak")[META]["Total"]}


def build(plan: ModelPlan, *, is_large: bool = False) -> RankTrainer:
    """Build this rank's part of a model.

    Args:
        plan: The model to build.
        is_large: Create no random weights, which would fill the host's memory one after the other.
    """
    large = [(setup, "random_tensor", _without_memory)] if is_large else []
    with replaced((setup, "fill_weights", _fill_weights), *large):
        return RankTrainer(plan, device=META)


def _fill_weights(model: torch.nn.Module, *args: Any) -> None:
    """Call the learner's `fill_weights` after checking that the model was never in the host's memory."""
    places = {parameter.device for parameter in model.parameters()}
    assert places == {META}, f"built on {places}"
    fill_weights(model, *args)


def _without_memory(name: str, shape: tuple[int, ...], plan: ModelPlan) -> torch.Tensor:
    return torch.empty(shape, device=META)
