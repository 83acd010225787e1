"""Compile functions of tensors with torch's compiler, or run them uncompiled if it does not work."""

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, ParamSpec, TypeVar

import structlog
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_log = structlog.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@lru_cache(maxsize=64)
def compiled(function: Callable[P, R], device_type: str, *, otherwise: Callable[P, R] | None = None) -> Callable[P, R]:
    """Return the function, compiled at its first call for tensors of any size on a device type.

    Args:
        function: Function that returns new tensors, or fills one of its arguments.
        device_type: Device type, such as "cuda".
        otherwise: Equivalent function for when compilation fails; None for the function itself.
    """
    plain = function if otherwise is None else otherwise
    return _Compiled(function, plain) if can_compile(device_type) else plain


@lru_cache(maxsize=8)
def can_compile(device_type: str) -> bool:
    """Return whether torch's compiler works, tested once per process with a tiny tensor.

    It needs a writable folder, Triton on a GPU, and a C++ compiler on a CPU. The meta device has nothing to compute.
    """
    if device_type == "meta":
        return False
    try:
        with _disable_current_modes():  # compiled code would read the memory of fake tensors, which have none
            _compile(_tried)(torch.ones(2, 3, device=device_type))
    except Exception as error:  # a broken compiler may raise anything; a step must not fail because of it
        _tell(error, device=device_type)
        return False
    return True


class _Compiled(Generic[P, R]):
    """A compiled function that runs uncompiled once the compiler fails, or for inputs beyond its recompile limit."""

    def __init__(self, function: Callable[P, R], plain: Callable[P, R]) -> None:
        self._compiled, self._plain = _compile(function), plain
        self._is_refused = self._is_told = False
        dynamo = torch._dynamo.exc
        self._refusals = (dynamo.TorchDynamoException, dynamo.FailOnRecompileLimitHit)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._is_refused and not any(isinstance(one, FakeTensor) for one in args):
            try:
                return self._compiled(*args, **kwargs)
            except self._refusals as error:  # raised before any computation
                self._is_refused = isinstance(error, self._refusals[0])
                if not self._is_told:
                    _tell(error, function=getattr(self._plain, "__name__", ""))
                self._is_told = True
        return self._plain(*args, **kwargs)


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    """Compile in this process. A pool of compiler processes per rank would take longer to start than it saves.

    `fullgraph=True` makes torch report a function that exceeds the recompile limit.
    """
    return torch.compile(function, dynamic=True, fullgraph=True, options={"compile_threads": 1})


def _tell(error: Exception, **of: str) -> None:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    _log.warning("not_compiled", **of, reason=reason)


def _tried(x: Tensor) -> Tensor:
    return x * 2.0 + 1.0
