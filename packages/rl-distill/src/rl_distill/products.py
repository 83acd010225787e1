"""float32 matrix products on CPUs with torch's library or, where it is faster, oneDNN.

torch calls MKL, which uses a slow path on some non-Intel processors; oneDNN generates code for each processor. Both
compute in true float32 but round differently, so a run chooses once and keeps its choice. oneDNN's product has no
public name in torch. If it is missing, "auto" uses torch's, and "onednn" raises an error.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from rl_core.errors import SettingsError

Products = Literal["torch", "onednn"]

_MIN_OPERATIONS = 2**21
"""Smaller products (in multiplications) stay torch's, since a call of oneDNN costs about 10 microseconds."""

_SHAPES = ((1024, 256, 1024), (1024, 1024, 256))
"""(rows, inputs, outputs) of the measured products."""

_MIN_GAIN = 1.25
"""Minimum speed-up at which oneDNN is chosen; with a lower one, two measurements could disagree."""


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for two matrices."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")  # type: ignore[no-any-return]


def has_onednn() -> bool:
    """Whether oneDNN is available, and its products agree with torch's."""
    a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    try:
        return bool(torch.equal(_onednn(a, b), torch.mm(a, b)))
    except (AttributeError, RuntimeError):
        return False


def chosen_products(wanted: str) -> Products:
    """Return the library to use; "auto" measures both briefly on this thread and returns the faster.

    Raises:
        SettingsError: oneDNN is requested, but this torch or processor lacks it.
    """
    if wanted == "torch" or (wanted == "auto" and not has_onednn()):
        return "torch"
    if wanted == "auto":
        return _measured()
    if not has_onednn():
        raise SettingsError(
            f'optimizer.products is "onednn", which torch {torch.__version__} does not have on this machine. Set it to '
            '"torch"; a run that started with oneDNN then continues with different rounding.'
        )
    return "onednn"


@lru_cache(maxsize=1)
def _measured() -> Products:
    """Return the faster library, measured once per process so that its models agree."""
    return "onednn" if min(_gain(*shape) for shape in _SHAPES) >= _MIN_GAIN else "torch"


def _gain(rows: int, inputs: int, outputs: int) -> float:
    """Measure oneDNN's speed-up: the ratio of the shortest of 15 alternating calls of each.

    Measures thread CPU time of short, alternating calls, since disturbances by other processes outlast a call.
    """
    a, b = torch.ones(rows, inputs), torch.ones(outputs, inputs).t()
    calls: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.mm, _onednn)
    times = [[_seconds(product, a, b) for product in calls] for _ in range(16)]
    del times[0]  # a warm-up
    return max(min(of_torch for of_torch, _ in times), 1e-9) / max(min(of_onednn for _, of_onednn in times), 1e-9)


def _seconds(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    start = time.thread_time()
    product(a, b)
    return time.thread_time() - start


def _is_large(a: Tensor, b: Tensor) -> bool:
    return a.dtype == torch.float32 and a.shape[0] * a.shape[1] * b.shape[1] >= _MIN_OPERATIONS


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _onednn(a, b) if _is_large(a, b) else _mm_out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(_onednn(a, b)) if _is_large(a, b) else torch.addmm(out, a, b, beta=0, out=out)


def _addmm_(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == alpha == 1 and _is_large(a, b):
        return total.add_(_onednn(a, b))
    return torch.addmm(total, a, b, beta=beta, alpha=alpha, out=total)


@contextmanager
def computing_with(products: str) -> Iterator[None]:
    """Compute float32 matrix products on the CPU with this library inside the context, forward and backward.

    Products outside the context stay torch's, since an engine may run in the same process.

    Args:
        products: "torch" or "onednn".
    """
    if products != "onednn":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):  # torch warns that a kernel is replaced
            for name, product in {"mm": _mm, "mm.out": _mm_out, "addmm_": _addmm_}.items():
                library.impl(name, product, "CPU", allow_override=True)
        yield
