"""Reading files of a checkpoint, which may be anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rl_core import files
from rl_core.errors import CheckpointError
from rl_core.files import checksum

CHUNK_BYTES = 1 << 24


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
    with files.open_plain(file, error=CheckpointError, follows_links=False) as opened:
        yield opened


def read_json_object(file: Path) -> dict[str, Any]:
    """An object of a checkpoint's JSON file.

    Raises:
        CheckpointError: It is missing, no plain file, too long, torn, or no object.
    """
    return files.read_json_object(file, error=CheckpointError, follows_links=False)
