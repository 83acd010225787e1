"""Files and folders that survive a crash: durable writes, checksums, and the permissions of new files."""

import contextlib
import os
import re
import uuid
from pathlib import Path

import crc32c as _crc32c
import numpy as np
from numpy.typing import NDArray

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
def write_atomically(file: Path, content: bytes) -> None:
    """Write a file that other processes may write and read at the same time. A power failure may lose it."""
    part = file.with_name(f".{file.name}.{uuid.uuid4().hex}.part")
    part.write_bytes(content)
    part.replace(file)


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


def checksum(buffer: bytes | bytearray | memoryview | NDArray[np.generic], start: int = 0) -> int:
    """Return the crc32c of contiguous memory, continued from `start`; releases the GIL during computation."""
    if isinstance(buffer, np.ndarray):
        buffer = buffer.reshape(-1).view(np.uint8)
    return int(_crc32c.crc32c(buffer, start))


def current_umask() -> int:
    """Return the umask of this process, without changing it if the kernel reports it."""
    try:
        match = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is not None:
        return int(match[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
