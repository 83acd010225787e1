"""Functions of tensors by torch's compiler, where it works; as they are where it does not."""

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
    """The function, compiled for tensors of any sizes on devices of a type, at its first call.

    Args:
        function: Tensors and numbers in, new tensors out, or one of the given ones filled.
        device_type: Such as "cuda".
        otherwise: What computes the same where it cannot be compiled; None for the function itself.
    """
    plain = function if otherwise is None else otherwise
    return _Compiled(function, plain) if can_compile(device_type) else plain


@lru_cache(maxsize=8)
def can_compile(device_type: str) -> bool:
    """Whether torch's compiler works here, found once in a process by a tiny tensor.

    It needs Triton on a GPU and a C++ compiler on a CPU, and a folder that it may write to. On the meta device there is
    nothing to compute.
    """
    if device_type == "meta":
        return False
    try:
        with _disable_current_modes():  # of tensors without values the compiled code would read the memory
            _compile(_tried)(torch.ones(2, 3, device=device_type))
    except Exception as error:  # whatever a compiler that is half there raises: a step never fails of it
        _tell(error, device=device_type)
        return False
    return True


class _Compiled(Generic[P, R]):
    """A compiled function, until the compiler refuses it; forms beyond its limit are computed as they are."""

    def __init__(self, function: Callable[P, R], plain: Callable[P, R]) -> None:
        self._compiled, self._plain = _compile(function), plain
        self._is_refused = self._is_told = False
        dynamo = torch._dynamo.exc
        self._refusals = (dynamo.TorchDynamoException, dynamo.FailOnRecompileLimitHit)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._is_refused and not any(isinstance(one, FakeTensor) for one in args):
            try:
                return self._compiled(*args, **kwargs)
            except self._refusals as error:  # raised before anything is computed
                self._is_refused = isinstance(error, self._refusals[0])
                if not self._is_told:
                    _tell(error, function=getattr(self._plain, "__name__", ""))
                self._is_told = True
        return self._plain(*args, **kwargs)


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    """Compile in this process: a pool of compiling processes per rank would take longer to start than it saves.

    `fullgraph=True` makes torch report a function with too many compiled forms.
    """
    return torch.compile(function, dynamic=True, fullgraph=True, options={"compile_threads": 1})


def _tell(error: Exception, **of: str) -> None:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    _log.warning("not_compiled", **of, reason=reason)


def _tried(x: Tensor) -> Tensor:
    return x * 2.0 + 1.0
