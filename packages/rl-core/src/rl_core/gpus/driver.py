"""The NVIDIA driver's readings of its cards, with nvidia-ml-py (extra `gpu`)."""

from functools import cache
from typing import Any

from rl_core.record_fields import record


@record
class DriverReading:
    """A reading of one card, which counts all its processes.

    Attributes:
        utilization: Share of the last sample period, up to a second, in which a kernel ran, in [0, 1].
        used_bytes: Memory in use.
        total_bytes: Memory of the card.
    """

    utilization: float
    used_bytes: int
    total_bytes: int


class GpuDriver:
    """The machine's NVIDIA driver."""

    def __init__(self, nvml: Any) -> None:
        """Store the module `pynvml`, initialized."""
        self._nvml = nvml

    def read_all(self) -> list[DriverReading]:
        """Read every card; empty if one does not tell."""
        nvml = self._nvml
        try:
            return [self._read(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:
            return []

    def utilization(self, uuid: str) -> float | None:
        """Return the utilization of the card with this UUID, such as "GPU-1f3a..."; None if it does not tell."""
        try:
            return self._read(self._nvml.nvmlDeviceGetHandleByUUID(uuid)).utilization
        except self._nvml.NVMLError:  # for example a part of a card (MIG), which has no utilization
            return None

    def _read(self, handle: Any) -> DriverReading:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return DriverReading(utilization=busy / 100, used_bytes=memory.used, total_bytes=memory.total)


@cache
def open_driver() -> GpuDriver | None:
    """Open the driver, once per process; None without nvidia-ml-py or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return GpuDriver(pynvml)
