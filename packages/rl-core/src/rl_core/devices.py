"""The device that a process computes on. No other code chooses one, except through CUDA's own interfaces."""

import torch

__all__ = ["own_device"]


def own_device() -> torch.device:
    """Return this process's current accelerator, or the CPU if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())
