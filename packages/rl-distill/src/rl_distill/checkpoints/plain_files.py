"""Reading files of a checkpoint, whose content is not trusted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rl_core import files
from rl_core.errors import CheckpointError
from rl_core.files import checksum

CHUNK_BYTES = 1 << 24


def file_crc32c(file: Path) -> int:
    """Return the CRC-32C of a file."""
    total = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            total = checksum(chunk, total)
    return total


@contextmanager
def open_plain(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file of a checkpoint; yields the stream and the file's size in bytes.

    Raises:
        CheckpointError: It does not exist, is a link or a device, or cannot be read.
    """
    with files.open_plain(file, error=CheckpointError, follows_links=False) as opened:
        yield opened


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        CheckpointError: The file is missing, not a regular file, too long, torn, or not a JSON object.
    """
    return files.read_json_object(file, error=CheckpointError, follows_links=False)
