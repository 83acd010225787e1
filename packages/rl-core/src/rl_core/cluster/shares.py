"""Fractional reservation and release of CPUs and GPUs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rl_core.cluster.options import ResourcePool
from rl_core.errors import SettingsError

EPSILON = 1e-6


class Taken(NamedTuple):
    """A reserved part of CPUs and GPUs.

    Attributes:
        cpus: Number of CPUs.
        gpus: Fraction of each device.
    """

    cpus: float
    gpus: Mapping[str, float]


class Shares:
    """Total and free CPUs and GPUs."""

    def __init__(self, cpus: float, gpus: Mapping[str, float]) -> None:
        """Initialize with everything free."""
        self.cpus = cpus
        self.gpus = dict(gpus)
        self.free_cpus = cpus
        self.free_gpus = dict(gpus)

    def take(self, cpus: float, gpus: float) -> Taken | None:
        """Take a part, or return None if too little is free; fractions prefer a GPU that is already in use."""
        if cpus and cpus > self.free_cpus + EPSILON:
            return None
        devices = self._devices(gpus)
        if devices is None:
            return None
        self.free_cpus -= cpus
        for device, part in devices.items():
            self.free_gpus[device] -= part
        return Taken(cpus, devices)

    def give_back(self, taken: Taken) -> None:
        """Return a part."""
        self.free_cpus += taken.cpus
        for device, part in taken.gpus.items():
            self.free_gpus[device] += part

    def _devices(self, gpus: float) -> dict[str, float] | None:
        if not gpus:
            return {}
        part = min(gpus, 1.0)
        fitting = [device for device, free in self.free_gpus.items() if free >= part - EPSILON]
        number = max(1, round(gpus))
        if len(fitting) < number:
            return None
        fitting.sort(key=lambda device: self.free_gpus[device])  # stable: ties keep the machine's order
        return dict.fromkeys(fitting[:number], part)


def count_room(shares: Shares, cpus: float, gpus: float, *, at_most: int) -> int:
    """Return the number of equal parts that could be taken in sequence."""
    taken: list[Taken] = []
    while len(taken) < at_most and (one := shares.take(cpus, gpus)) is not None:
        taken.append(one)
    for one in taken:
        shares.give_back(one)
    return len(taken)


def empty_slot(pool: ResourcePool) -> Shares:
    """Create an unused slot, with numbered GPUs."""
    number = max(1, int(pool.gpus))
    return Shares(pool.cpus, {str(index): min(pool.gpus, 1.0) for index in range(number)})


def describe_shares(cpus: float, gpus: float) -> str:
    """Describe shares, such as "2 CPUs and 0.5 GPUs"."""
    return f"{cpus:g} CPU{'' if cpus == 1 else 's'} and {gpus:g} GPU{'' if gpus == 1 else 's'}"


def machine_shares() -> Shares:
    """Return the CPUs and GPUs that this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Shares(float(cpus), dict.fromkeys(visible_gpus(), 1.0))


def visible_gpus() -> list[str]:
    """Return the GPU names in CUDA_VISIBLE_DEVICES; the driver's devices if it is not set.

    Raises:
        SettingsError: The variable lists a device twice.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    devices: list[str] = []
    for device in map(str.strip, chosen.split(",")):
        if not device or device.startswith("-"):
            break  # CUDA also stops here
        if device in devices:
            raise SettingsError(f"CUDA_VISIBLE_DEVICES lists device {device} twice: {chosen!r}.")
        devices.append(device)
    return devices
