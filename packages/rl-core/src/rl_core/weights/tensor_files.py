"""Writes safetensors files."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import DiskError
from rl_core.record_fields import converts_arguments

if TYPE_CHECKING:
    import torch


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
