"""Pure functions by torch's compiler, where it works; as they are where it does not."""

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

import structlog
import torch
from torch import Tensor

_log = structlog.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@lru_cache(maxsize=64)
def compiled(function: Callable[P, R], device_type: str) -> Callable[P, R]:
    """The function, compiled for tensors of any sizes on devices of a type; itself where nothing can be compiled.

    Args:
        function: Pure: tensors and numbers in, tensors out, nothing changed that it was given.
        device_type: Such as "cuda".
    """
    return torch.compile(function, dynamic=True) if can_compile(device_type) else function


@lru_cache(maxsize=8)
def can_compile(device_type: str) -> bool:
    """Whether torch's compiler works here, found once in a process by a tiny tensor.

    It needs Triton on a GPU and a C++ compiler on a CPU, and a folder that it may write to.
    """
    try:
        torch.compile(_tried, dynamic=True)(torch.ones(2, 3, device=device_type))
    except Exception as error:  # whatever a compiler that is half there raises: a step never fails of it
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        _log.warning("not_compiled", device=device_type, reason=reason)
        return False
    return True


def _tried(x: Tensor) -> Tensor:
    return x * 2.0 + 1.0
