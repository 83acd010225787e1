"""A process's use of its GPU between two calls of each of its owners, such as a learner and an engine.

Peaks come from torch's allocator, the utilization of the card from the NVIDIA driver (nvidia-ml-py, extra `gpu`).
"""

import asyncio
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from rl_core.errors import RLError
from rl_core.record_fields import record

__all__ = ["GpuUse", "gpu_use_of", "own_gpu_use"]

BYTES_PER_GIB = 2**30
SAMPLE_S = 1.0
"""Seconds between two samples of the utilization."""
ASK_DEADLINE_S = 10.0
"""Maximum seconds to wait for an owner's figures, so that a busy one does not delay a step."""


@record
class GpuUse:
    """Use of one GPU since the owner's last call.

    Attributes:
        max_memory_allocated_gb: Peak memory of torch's tensors in the process, in GiB.
        max_memory_reserved_gb: Peak memory that torch reserved in the process, in GiB.
        memory_total_gb: Memory of the card, in GiB.
        gpu_utilization: Mean share of the time in which the card ran a kernel of any process, in [0, 1]; None if the
            driver does not tell.
    """

    max_memory_allocated_gb: float
    max_memory_reserved_gb: float
    memory_total_gb: float
    gpu_utilization: float | None = None


class TorchGpu:
    """The device on which torch has reserved most in this process."""

    def __init__(self, cuda: Any) -> None:
        """Choose the device.

        Args:
            cuda: The module `torch.cuda`, initialized.
        """
        self._cuda = cuda
        self._index = max(range(cuda.device_count()), key=cuda.max_memory_reserved)
        properties = cuda.get_device_properties(self._index)
        self.total_bytes: int = properties.total_memory
        self._uuid = f"GPU-{getattr(properties, 'uuid', '')}"

    def take_peaks(self) -> tuple[int, int]:
        """Return the allocated and reserved peaks in bytes since the last call."""
        peaks = self._cuda.max_memory_allocated(self._index), self._cuda.max_memory_reserved(self._index)
        self._cuda.reset_peak_memory_stats(self._index)
        return peaks

    def utilization(self) -> float | None:
        """Return the current utilization in [0, 1]; None if unknown, for example for a part of a card (MIG)."""
        nvml = driver()
        if nvml is None:
            return None
        try:
            busy: int = nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByUUID(self._uuid)).gpu
        except nvml.NVMLError:
            return None
        return busy / 100


@cache
def driver() -> Any:
    """Return the module `pynvml` with an open driver; None without nvidia-ml-py or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@dataclass(slots=True)
class _OpenUse:
    """What one owner has not taken yet."""

    allocated: int = 0
    reserved: int = 0
    busy: float = 0.0
    num_samples: int = 0


class GpuMeter:
    """Measures a process's GPU. Owners that share the process each see the peaks of their own windows."""

    def __init__(self, gpu: TorchGpu) -> None:
        """Store the GPU. `watch` samples its utilization in a thread."""
        self._gpu = gpu
        self._lock = threading.Lock()
        self._windows: dict[str, _OpenUse] = {}

    def take(self, owner: str) -> GpuUse:
        """Return the use since this owner's last call; its first call counts from the start of the process."""
        with self._lock:
            window = self._windows.setdefault(owner, _OpenUse())
            allocated, reserved = self._gpu.take_peaks()
            for open_window in self._windows.values():
                open_window.allocated = max(open_window.allocated, allocated)
                open_window.reserved = max(open_window.reserved, reserved)
            if not window.num_samples:
                self._sample()
            self._windows[owner] = _OpenUse()
        return GpuUse(
            max_memory_allocated_gb=window.allocated / BYTES_PER_GIB,
            max_memory_reserved_gb=window.reserved / BYTES_PER_GIB,
            memory_total_gb=self._gpu.total_bytes / BYTES_PER_GIB,
            gpu_utilization=window.busy / window.num_samples if window.num_samples else None,
        )

    def sample(self) -> bool:
        """Count the current utilization for every owner; return False if it is unknown."""
        with self._lock:
            return self._sample()

    def watch(self) -> None:
        """Sample the utilization in a daemon thread."""
        threading.Thread(target=self._watch, name="gpu utilization", daemon=True).start()

    def _sample(self) -> bool:
        busy = self._gpu.utilization()
        if busy is None:
            return False
        for window in self._windows.values():
            window.busy += busy
            window.num_samples += 1
        return True

    def _watch(self) -> None:
        while self.sample():
            time.sleep(SAMPLE_S)


_meters: list[GpuMeter] = []
_opening = threading.Lock()


def own_gpu_use(owner: str) -> list[GpuUse]:
    """Return the use of this process's GPU since the owner's last call; empty if torch does not compute on one.

    Args:
        owner: Part of the process that asks, such as "learner".
    """
    with _opening:
        if not _meters:
            gpu = own_gpu()
            if gpu is None:
                return []
            _meters.append(GpuMeter(gpu))
            _meters[0].watch()
    return [_meters[0].take(owner)]


def own_gpu() -> TorchGpu | None:
    """Return the GPU on which torch computes in this process; None before its first use, or without one."""
    torch = sys.modules.get("torch")
    return TorchGpu(torch.cuda) if torch is not None and torch.cuda.is_initialized() else None


async def gpu_use_of(owner: object, *, deadline_s: float = ASK_DEADLINE_S) -> list[GpuUse]:
    """Ask an engine or a teacher for the use of its GPUs.

    Args:
        owner: Has the method `async def gpu_use(self) -> list[GpuUse]`, or does not report its GPUs.
        deadline_s: Maximum seconds to wait.

    Returns:
        One entry per GPU; empty if the owner does not report them, has failed, or does not answer in time.
    """
    ask = getattr(owner, "gpu_use", None)
    if ask is None:
        return []
    try:
        async with asyncio.timeout(deadline_s):
            found: list[GpuUse] = await ask()
            return found
    except (RLError, TimeoutError):
        return []
