"""Reading files of a checkpoint, which may be anything."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rl_core.errors import CheckpointError
from rl_core.files import checksum

CHUNK_BYTES = 1 << 24
MAX_JSON_BYTES = 1 << 26


def file_crc32c(file: Path) -> int:
    """crc32c of a file's bytes."""
    total = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            total = checksum(chunk, total)
    return total


@contextmanager
def open_plain(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file of a checkpoint, and say its size.

    Raises:
        CheckpointError: It does not exist, is a link or a device, or the file system would not give it.
    """
    try:
        # A pipe without a writer would wait for ever.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; {file.parent} is no complete checkpoint.") from None
    except (OSError, ValueError) as error:
        reason = "it is a link" if file.is_symlink() else str(error)
        raise CheckpointError(f"{file} must be a plain file that can be read: {reason}.") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{file} must be a plain file; it is a folder, a pipe or a device.")
    with os.fdopen(descriptor, "rb") as stream:
        yield stream, status.st_size


def read_json_object(file: Path) -> dict[str, Any]:
    """An object of a checkpoint's JSON file.

    Raises:
        CheckpointError: It is missing, no plain file, too long, torn, or no object.
    """
    with open_plain(file) as (stream, size):
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{file} has {size} bytes; at most {MAX_JSON_BYTES} were expected.")
        content = stream.read(size)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is torn: {error}.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON object; found {type(found).__name__}.")
    return found
