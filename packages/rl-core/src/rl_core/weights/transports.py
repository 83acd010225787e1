"""Transports of weights: tensors within a process, or a file in shared memory."""

import tempfile
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import NotReadyError
from rl_core.files.locked_folders import locked_folder, remove_unlocked_folders
from rl_core.record_fields import converts_arguments
from rl_core.weights.digests import digest_tensors
from rl_core.weights.tensor_files import write_safetensors
from rl_core.weights.update import AdapterUpdate, WeightUpdate

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory, not a temporary file
FOLDER_PREFIX = "rl-weights-"


def host_tensors(tensors: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Return contiguous tensors in host memory; only tensors on a GPU are copied."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


class TensorTransport:
    """Passes tensors within one process without a copy."""

    def pack(
        self,
        tensors: Mapping[str, "torch.Tensor"],
        *,
        version: int,
        tied: Mapping[str, str],
        adapter: AdapterUpdate | None = None,
    ) -> WeightUpdate:
        """See `WeightTransport.pack`; an adapter's slot is always proved by crc32c."""
        digests = digest_tensors(tensors, kind=None if adapter is None else "crc32c")
        return WeightUpdate(version=version, digests=digests, tensors=dict(tensors), tied=dict(tied), adapter=adapter)

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
        self,
        tensors: Mapping[str, "torch.Tensor"],
        *,
        version: int,
        tied: Mapping[str, str],
        adapter: AdapterUpdate | None = None,
    ) -> WeightUpdate:
        """See `WeightTransport.pack`."""
        if not self._folder.is_dir():
            raise NotReadyError(
                f"the weight transport is closed; its folder {self._folder} was removed. Create a new one."
            )
        file = self._folder / "weights.safetensors"
        part = self._folder / "weights.part"
        on_host = host_tensors(tensors)
        write_safetensors(on_host, part)
        part.replace(file)
        return WeightUpdate(
            version=version, digests=digest_tensors(on_host), file=file, tied=dict(tied), adapter=adapter
        )

    def close(self) -> None:
        """See `WeightTransport.close`."""
        self._close()
