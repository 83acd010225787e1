"""How weights travel: as tensors within a process, or as a file in shared memory."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import NotReadyError
from rl_core.weights.update import WeightUpdate, digest_tensors

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory, not a temporary file
FOLDER_PREFIX = "rl-weights-"


class TensorTransport:
    """Hands tensors over within one process, without a copy."""

    def pack(self, tensors: Mapping[str, "torch.Tensor"], *, version: int, tied: Mapping[str, str]) -> WeightUpdate:
        """See `WeightTransport.pack`."""
        digests = digest_tensors(tensors)
        return WeightUpdate(version=version, digests=digests, tensors=dict(tensors), tied=dict(tied))

    def close(self) -> None:
        """See `WeightTransport.close`."""


class SharedFileTransport:
    """Writes a safetensors file into shared memory (or a temporary folder where there is none).

    Its folder is locked as long as its process lives, so that the next transport can remove what a killed one left.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Make a private folder for the file.

        Args:
            directory: Where to make it; shared memory by default.
        """
        default = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        parent = directory or default
        remove_abandoned_folders(parent)
        self._folder, self._lock_fd = make_locked_folder(parent)

    def pack(self, tensors: Mapping[str, "torch.Tensor"], *, version: int, tied: Mapping[str, str]) -> WeightUpdate:
        """See `WeightTransport.pack`."""
        from safetensors.torch import save_file

        digests = digest_tensors(tensors)
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
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def make_locked_folder(parent: Path) -> tuple["tempfile.TemporaryDirectory[str]", int | None]:
    """A folder of our own, and the descriptor that holds its lock."""
    while True:
        folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=parent)
        lock_fd = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        if Path(folder.name).is_dir():
            return folder, lock_fd
        os.close(lock_fd)  # another process took it for abandoned before it was locked


def remove_abandoned_folders(parent: Path) -> None:
    """Remove the folders of transports whose processes are gone: a killed process leaves no lock."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # another user's, or gone meanwhile
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its process lives
        finally:
            os.close(lock_fd)
