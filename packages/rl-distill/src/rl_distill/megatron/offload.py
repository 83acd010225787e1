"""Offload a model's memory between phases: storages leave the device and return to the same tensors.

Tensors that view an offloaded storage stay valid objects; only their storage is empty in the meantime.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Offloaded:
    """Storages that were emptied, with their contents."""

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> None:
        """Empty the storages of some tensors.

        Args:
            kept: Tensors whose contents are copied to CPU memory, pinned if they are on a GPU.
            dropped: Tensors whose contents are discarded, and become zeros on `restore`.
        """
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        seen: set[int] = set()
        for tensor in kept:
            storage = _fresh(tensor, seen)
            if storage is not None:
                content = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
                content.copy_(_bytes_of(storage))
                storage.resize_(0)
                self._kept.append((storage, content))
        for tensor in dropped:
            storage = _fresh(tensor, seen)
            if storage is not None:
                self._dropped.append((storage, storage.nbytes()))
                storage.resize_(0)
        self.num_bytes = sum(len(content) for _, content in self._kept) + sum(size for _, size in self._dropped)

    def restore(self) -> None:
        """Refill the storages."""
        for storage, content in self._kept:
            storage.resize_(len(content))
            _bytes_of(storage).copy_(content)
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self._kept, self._dropped = [], []


def _fresh(tensor: Tensor, seen: set[int]) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if it is empty or already seen."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() in seen:
        return None
    seen.add(storage.data_ptr())
    return storage


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
