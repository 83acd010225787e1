"""Use of GPUs: peaks of torch's allocator in a process, and the driver's utilization of a card."""

from rl_core.gpus.driver import DriverReading, GpuDriver, open_driver
from rl_core.gpus.meter import GpuUse, gpu_use_of, own_gpu_use

__all__ = ["DriverReading", "GpuDriver", "GpuUse", "gpu_use_of", "open_driver", "own_gpu_use"]
