"""Memory of a model between phases: storages leave the device, and come back where they were.

Every tensor that looks into a storage stays what it is; only the storage is empty meanwhile.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor


class Offloaded:
    """Storages that were emptied, and what was in them."""

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> None:
        """Empty the storages of some tensors.

        Args:
            kept: Their contents go to the CPU's memory, pinned where there is a GPU.
            dropped: Their contents are forgotten, and are zeros afterwards.
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
        """Fill the storages again."""
        for storage, content in self._kept:
            storage.resize_(len(content))
            _bytes_of(storage).copy_(content)
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self._kept, self._dropped = [], []


class Hosted:
    """Tensors that are in the host's memory, and on their device only while something works with them."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Move them to the host.

        Args:
            tensors: Gives those that there are; asked for each time that they leave the device.
        """
        self._tensors = tensors
        self._offloaded = Offloaded(tensors(), [])

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside the context they are where they came from."""
        self._offloaded.restore()
        try:
            yield
        finally:
            self._offloaded = Offloaded(self._tensors(), [])


def _fresh(tensor: Tensor, seen: set[int]) -> torch.UntypedStorage | None:
    """The storage behind a tensor; None where it is empty, or was seen."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() in seen:
        return None
    seen.add(storage.data_ptr())
    return storage


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
