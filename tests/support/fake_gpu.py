"""A fake GPU for every process of a test that computes in it, in place of torch's."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from rl_core import gpus
from rl_core.gpus import GpuUse

GIB = 2**30
USE = GpuUse(max_memory_allocated_gb=20.0, max_memory_reserved_gb=24.0, memory_total_gb=80.0, gpu_utilization=0.5)
"""Use of the fake GPU in every step."""


class FakeGpu:
    """A card of 80 GiB with the same use in every step."""

    total_bytes = 80 * GIB

    def take_peaks(self) -> tuple[int, int]:
        return 20 * GIB, 24 * GIB

    def utilization(self) -> float:
        return 0.5


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let this process compute on the fake GPU, without the thread that samples it."""
    with (
        patch.object(gpus, "own_gpu", FakeGpu),
        patch.object(gpus, "_meters", []),
        patch.object(gpus.GpuMeter, "watch", lambda _: None),
    ):
        yield


def figures(owner: str) -> dict[str, float]:
    """Return the metrics of an owner with one such GPU."""
    return {
        f"{owner}/max_memory_allocated_gb": 20.0,
        f"{owner}/max_memory_reserved_gb": 24.0,
        f"{owner}/memory_total_gb": 80.0,
        f"{owner}/gpu_utilization": 0.5,
    }
