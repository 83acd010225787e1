"""Files and folders that survive a crash."""

import contextlib
import os
from pathlib import Path

from rl_core.record_fields import converts_arguments


@converts_arguments
def write_durably(file: Path, content: bytes) -> None:
    """Write a temporary file, flush it to disk, and rename it into place."""
    part = file.with_name(f".{file.name}.part")
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    sync_folder(file.parent)


@converts_arguments
def sync_file(file: Path) -> None:
    """Flush a file to disk."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: str | Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # unsupported by some file systems
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
