"""How weights travel: as tensors within a process, or as a file in shared memory."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import NotReadyError
from rl_core.weights import WeightUpdate, digest_tensor

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory, not a temporary file


class TensorTransport:
    """Hands tensors over within one process, without a copy."""

    def pack(self, tensors: Mapping[str, "torch.Tensor"], *, version: int, tied: Mapping[str, str]) -> WeightUpdate:
        """See `WeightTransport.pack`."""
        digests = {name: digest_tensor(tensor) for name, tensor in tensors.items()}
        return WeightUpdate(version=version, digests=digests, tensors=dict(tensors), tied=dict(tied))

    def close(self) -> None:
        """See `WeightTransport.close`."""


class SharedFileTransport:
    """Writes a safetensors file into shared memory (or a temporary folder where there is none)."""

    def __init__(self, directory: Path | None = None) -> None:
        """Make a private folder for the file.

        Args:
            directory: Where to make it; shared memory by default.
        """
        parent = directory or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        self._folder = tempfile.TemporaryDirectory(prefix="rl-weights-", dir=parent)

    def pack(self, tensors: Mapping[str, "torch.Tensor"], *, version: int, tied: Mapping[str, str]) -> WeightUpdate:
        """See `WeightTransport.pack`."""
        from safetensors.torch import save_file

        digests = {name: digest_tensor(tensor) for name, tensor in tensors.items()}
        folder = Path(self._folder.name)
        if not folder.is_dir():
            raise NotReadyError(f"the weight transport is closed; its folder {folder} is gone. Make a new one.")
        file = folder / "weights.safetensors"
        part = folder / "weights.part"
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, part)
        part.replace(file)
        return WeightUpdate(version=version, digests=digests, file=file, tied=dict(tied))

    def close(self) -> None:
        """See `WeightTransport.close`."""
        self._folder.cleanup()
