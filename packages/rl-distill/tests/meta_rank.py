"""One rank of a GPU's learner in this process alone: its tensors on the meta device, its collectives doing nothing.

Shapes, dtypes, devices and the branches that are taken are a GPU's. Tensors have no values: where the learner asks for
numbers between its passes it gets ones, and in a pass nothing may ask.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core.pipeline_parallel.p2p_communication as p2p
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.optim import adam
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_distill.megatron import rank_model, setup
from rl_distill.megatron.parallel import initialize_groups
from rl_distill.megatron.rank_model import RankModel
from rl_distill.megatron.setup import ModelPlan
from rl_distill.options import ParallelOptions

META, HOST = torch.device("meta"), torch.device("cpu")
aten, c10d = torch.ops.aten, torch.ops.c10d

WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_dim}
"""What stops the host until a GPU has come so far."""


COALESCED = {
    c10d.allreduce_coalesced_: 1,
    c10d.allgather_into_tensor_coalesced_: 2,
    c10d.reduce_scatter_tensor_coalesced_: 2,
}
"""Collectives that torch has no fake ones of, and which of their arguments is the group; a barrier stands in."""


class WaitError(AssertionError):
    """In a pass the host waits for the GPU, or an operation mixes tensors of both."""


class AsOnGpu(TorchDispatchMode):
    """Refuses what would wait in a pass, and answers with ones between passes.

    Attributes:
        is_in_pass: True within megatron's schedule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_in_pass = False

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """A forward or backward pass runs inside the context."""
        self.is_in_pass = True
        try:
            yield
        finally:
            self.is_in_pass = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        on_gpu = [one for one in tensors if one.device.type == "meta"]
        packet = func.overloadpacket
        if packet in (aten._to_copy, aten.copy_):
            self._check_copy(func, tensors, kwargs)
        elif on_gpu and any(one.device.type != "meta" and one.ndim for one in tensors):
            raise WaitError(f"{func} of tensors on {[str(one.device) for one in tensors]}")
        if on_gpu and packet in WAITS:
            if self.is_in_pass:
                raise WaitError(f"{func} of {[list(one.shape) for one in on_gpu]} waits for the GPU")
            if packet is aten._local_scalar_dense:
                return torch.ones((), dtype=on_gpu[0].dtype).item()
        if on_gpu and packet is aten._to_copy and torch.device(kwargs.get("device") or META).type == "cpu":
            return torch.ones(on_gpu[0].shape, dtype=kwargs.get("dtype") or on_gpu[0].dtype)
        if packet in COALESCED:
            return c10d.barrier.default(torch.empty(0, device=META), args[COALESCED[packet]], [])
        return func(*args, **kwargs)

    def _check_copy(self, func: Any, tensors: list[torch.Tensor], kwargs: Any) -> None:
        """In a pass a copy between host and GPU must not be waited for."""
        source, target = tensors[-1].device, torch.device(kwargs.get("device") or tensors[0].device)
        if self.is_in_pass and source != target and not kwargs.get("non_blocking"):
            raise WaitError(f"{func} of {list(tensors[-1].shape)} from {source} to {target} waits")


def become_rank(rank: int, parallel: ParallelOptions) -> None:
    """Make this process a rank of a layout; it can be called again."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.ranks)
    initialize_groups(parallel, seed=0)


@contextlib.contextmanager
def as_on_gpu(*, length: int, hidden_size: int) -> Iterator[AsOnGpu]:
    """Inside the context models are built on the meta device, and their steps are watched.

    Args:
        length: Tokens of each micro-batch on a rank, as pipeline stages would tell one another.
        hidden_size: Of the model.
    """
    mode, schedule = AsOnGpu(), rank_model.get_forward_backward_func

    def watched() -> Callable[..., Any]:
        def run(**kwargs: Any) -> Any:
            with mode.in_pass():
                return schedule()(**kwargs)

        return run

    def shapes(*_: Any, **__: Any) -> tuple[list[int], list[int]]:
        return [length, 1, hidden_size], [length, 1, hidden_size]

    watching = (
        (rank_model, "get_forward_backward_func", watched),
        (p2p.P2PCommunicator, "_communicate_shapes", shapes),
        (adam, "_device_dtype_check_for_fused", lambda *_, **__: None),  # its list of devices lacks this one
    )
    with replaced(*watching), mode:
        yield mode


@contextlib.contextmanager
def replaced(*values: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside the context, attributes (owner, name) have other values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    for owner, name, value in values:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def build(plan: ModelPlan, *, is_large: bool = False) -> RankModel:
    """This rank's part of a model.

    Args:
        plan: What to build.
        is_large: Build on the meta device, without memory; else in the host's, from where the learner moves it.
    """
    if not is_large:
        return RankModel(plan, device=META)
    with replaced((rank_model, "build_chunks", _build_without_memory), (setup, "random_tensor", _without_memory)):
        return RankModel(plan, device=META)


def _build_without_memory(*args: Any, **kwargs: Any) -> list[Any]:
    with META:
        return setup.build_chunks(*args, **kwargs)


def _without_memory(name: str, shape: tuple[int, ...], plan: ModelPlan) -> torch.Tensor:
    return torch.empty(shape, device=META)
