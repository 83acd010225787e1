"""Transports of weights: tensors within a process, or a safetensors file in shared memory."""

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import DiskError, NotReadyError
from rl_core.files.locked_folders import locked_folder, remove_unlocked_folders
from rl_core.record_fields import converts_arguments
from rl_core.weights.digests import digest_tensors
from rl_core.weights.update import AdapterUpdate, InFile, InProcess, NamedTensors, WeightUpdate

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory, not a temporary file
FOLDER_PREFIX = "rl-weights-"


class TensorTransport:
    """Passes tensors within one process without a copy."""

    def pack(
        self, tensors: NamedTensors, *, version: int, tied: Mapping[str, str], adapter: AdapterUpdate | None = None
    ) -> WeightUpdate:
        """See `WeightTransport.pack`; an adapter's slot is always proved by crc32c."""
        digests = digest_tensors(tensors, kind=None if adapter is None else "crc32c")
        location = InProcess(tensors=dict(tensors))
        return WeightUpdate(version=version, digests=digests, location=location, tied=dict(tied), adapter=adapter)

    def close(self) -> None:
        """See `WeightTransport.close`."""


class SharedFileTransport:
    """Writes a safetensors file into shared memory, or a temporary folder if there is none.

    The folder is locked while its process is alive, so that the next transport can remove leftovers of killed
    processes.
    """

    @converts_arguments
    def __init__(self, directory: Path | None = None) -> None:
        """Create a private folder for the file.

        Args:
            directory: Parent folder; shared memory by default.
        """
        default = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        parent = directory or default
        remove_unlocked_folders(parent.glob(f"{FOLDER_PREFIX}*"))
        stack = ExitStack()
        self._folder = stack.enter_context(locked_folder(parent, FOLDER_PREFIX, mode=0o700))
        self._close = weakref.finalize(self, stack.close)

    def pack(
        self, tensors: NamedTensors, *, version: int, tied: Mapping[str, str], adapter: AdapterUpdate | None = None
    ) -> WeightUpdate:
        """See `WeightTransport.pack`."""
        if not self._folder.is_dir():
            raise NotReadyError(
                f"the weight transport is closed; its folder {self._folder} was removed. Create a new one."
            )
        file = self._folder / "weights.safetensors"
        part = self._folder / "weights.part"
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_safetensors(on_host, part)
        part.replace(file)
        return WeightUpdate(
            version=version,
            digests=digest_tensors(on_host),
            location=InFile(file=file),
            tied=dict(tied),
            adapter=adapter,
        )

    def close(self) -> None:
        """See `WeightTransport.close`."""
        self._close()


@converts_arguments
def write_safetensors(
    tensors: Mapping[str, "torch.Tensor"], file: Path, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors into a safetensors file, with mode 0600; if that fails, an earlier file stays as it was.

    Args:
        tensors: Contiguous tensors in host memory.
        file: Target file.
        metadata: Text in the file's header.

    Raises:
        DiskError: The file cannot be written, for example because the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    is_new = not file.exists()
    try:
        save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    except (SafetensorError, OSError) as error:  # safetensors has an error of its own for a full disk
        if is_new:
            file.unlink(missing_ok=True)
        raise DiskError(f"{file} cannot be written: {error}. {_room(file.parent, tensors)}") from error


def _room(folder: Path, tensors: Mapping[str, "torch.Tensor"]) -> str:
    if not folder.is_dir():
        return "Its folder does not exist."
    size, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(folder).free
    return f"It needs {size} bytes, and {free} are free in {folder}: free some, or choose a folder on another disk."
