"""Run megatron-core on machines without a GPU.

megatron-core has no CPU training path. It hard-codes `device="cuda"`, queries the current CUDA device, and compares
tensor type names with "torch.cuda.FloatTensor". This file replaces `torch` inside Megatron's modules by an overlay that
handles these calls on the CPU and forwards all others. torch itself is not patched, because an inference engine in the
same process may depend on it.
"""

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import megatron.core.parallel_state as parallel_state
import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.tensor_parallel.random as random
import torch
import torch.distributed as dist
from megatron.core.package_info import __version__
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.distributed import distributed_c10d

from rl_core.devices import own_device

TESTED_VERSIONS = ("0.16.1",)
"""megatron-core versions that this file was tested with."""

_FACTORIES = ("zeros", "ones", "tensor", "empty", "full", "arange")


class _Synchronous:
    """A CUDA stream or event on which all work has already completed."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept the arguments of CUDA streams and events."""

    def record_event(self, event: object = None) -> "_Synchronous":  # noqa: ARG002 - as torch's
        """Return an event that has already completed."""
        return self

    def wait(self, other: object = None) -> None:
        """Do nothing: no work is pending."""

    wait_stream = wait_event = record = wait

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""


def _overlay(module: types.ModuleType, replacements: dict[str, Any]) -> types.ModuleType:
    """Return a module that replaces some attributes of another and forwards the rest."""
    overlay = types.ModuleType(module.__name__)
    overlay.__dict__.update(replacements, __getattr__=functools.partial(getattr, module))
    return overlay


def _elsewhere(factory: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = device
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
    """Gather tensors of different lengths, which gloo does not support, by padding to the longest."""
    longest = max(len(output) for output in outputs)
    padded = own.new_zeros(longest, *own.shape[1:])
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in outputs]
    dist.all_gather(gathered, padded, group=group)
    for output, values in zip(outputs, gathered, strict=True):
        output.copy_(values[: len(output)])


def _reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: Any = None) -> None:
    """Reduce and scatter tensors of different lengths by padding to the longest."""
    longest = max(len(part) for part in inputs)
    padded = output.new_zeros(len(inputs), longest, *output.shape[1:])
    for place, part in zip(padded, inputs, strict=True):
        place[: len(part)] = part
    own = torch.empty_like(padded[0])
    dist.reduce_scatter_tensor(own, padded.flatten(0, 1), group=group)
    output.copy_(own[: len(output)])


class _SerialGloo(dist.ProcessGroupGloo):
    """A gloo group that runs one operation at a time.

    The two threads of torch's groups write the name of the last operation without a lock. When both end one at the same
    time, its memory is freed twice (torch 2.13).
    """

    def __init__(self, store: distributed_c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Build the group, with the arguments of `dist.new_group`."""
        options = distributed_c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self.create_default_device()]
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


_groups: dict[object, dict[tuple[int, ...], Any]] = {}
"""Process groups of the current world by their ranks, under the world's own group."""


def _shared_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Any:
    """Return a new process group, or an earlier one of the same ranks.

    Megatron creates about forty groups, many with the same ranks, and each gloo group has threads that wake a hundred
    times a second. On a GPU, groups stay separate because each has its own streams, which may overlap. All ranks ask in
    the same order, so they make the same choice.
    """
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
    of_world = _groups.setdefault(world, {})
    key = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
    if key not in of_world:
        usual = distributed_c10d.ProcessGroupGloo
        distributed_c10d.ProcessGroupGloo = _SerialGloo  # type: ignore[misc]  # new_group takes no options of gloo
        try:
            of_world[key] = dist.new_group(ranks=list(key), **{**kwargs, "backend": dist.get_backend()})
        finally:
            distributed_c10d.ProcessGroupGloo = usual  # type: ignore[misc]
    return of_world[key]


def _torch_overlay(device: torch.device) -> types.ModuleType:
    stream = _Synchronous()
    cuda = {
        "current_device": lambda: device,
        "synchronize": lambda *_, **__: None,
        "empty_cache": lambda: None,
        "Stream": _Synchronous,
        "Event": _Synchronous,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    }
    factories = {name: _elsewhere(getattr(torch, name), device) for name in _FACTORIES}
    return _overlay(torch, {"cuda": _overlay(torch.cuda, cuda), **factories})


@contextlib.contextmanager
def cuda_type_names(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Make these parameters report torch.cuda types inside the context; a no-op with CUDA.

    Megatron's mixed-precision optimizer groups its parameters by `parameter.type()`.
    """
    on_cpu = [parameter for parameter in parameters if not parameter.is_cuda]
    for parameter in on_cpu:
        name = "torch.cuda." + str(parameter.type()).rpartition(".")[2]
        parameter.type = functools.partial(str, name)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for parameter in on_cpu:
            del parameter.type


def check_megatron_version() -> None:
    """Warn if this megatron-core version was not tested."""
    if __version__ not in TESTED_VERSIONS:
        warnings.warn(
            f"megatron-core {__version__} was not tested with this package (tested: {', '.join(TESTED_VERSIONS)}); "
            "on a CPU this package replaces megatron-core's internals by name, and they may have changed.",
            RuntimeWarning,
            stacklevel=2,
        )


def _as_numpy_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001 - megatron's signature
    """Convert a tensor to numpy if requested; Megatron's version does not convert tensors already on the CPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def install_cpu_compatibility() -> None:
    """Prepare Megatron's loaded modules for a device without CUDA; a no-op with CUDA. Can be called again.

    Call it before any of Megatron's objects is created.
    """
    check_megatron_version()
    if torch.cuda.is_available():
        return
    overlay = _torch_overlay(own_device())
    uneven = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    of_module = {
        mappings.__name__: _overlay(overlay, {"distributed": _overlay(dist, uneven)}),
        parallel_state.__name__: _overlay(overlay, {"distributed": _overlay(dist, {"new_group": _shared_group})}),
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = of_module.get(name, overlay)  # type: ignore[attr-defined]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = _as_numpy_on_cpu
