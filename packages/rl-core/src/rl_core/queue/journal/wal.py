"""Analysis of SQLite's write-ahead log after a crash: complete transactions, and an incomplete one at the end."""

import struct
from pathlib import Path

import numpy as np

from rl_core.errors import JournalError
from rl_core.files import read_plain

WAL_HEADER = struct.Struct(">8I")
FRAME_HEADER = struct.Struct(">6I")
MAX_BYTES = 1 << 30
PAGE_BYTES = tuple(1 << power for power in range(9, 17))
MAGICS = (0x377F0682, 0x377F0683)
"""The last bit selects the byte order of checksums."""


def read_wal(path: Path) -> tuple[int, int]:
    """Scan a log; a missing log counts as empty.

    Returns:
        The number of complete transactions, and the bytes of an incomplete one after them, which SQLite
        ignores.

    Raises:
        JournalError: The log is not a regular file, or is too large.

    Source: the SQLite file format, section 4, the write-ahead log.
    """
    try:
        content = read_plain(path, max_bytes=MAX_BYTES, error=JournalError)
    except JournalError:
        if path.exists():
            raise
        return 0, 0
    if len(content) < WAL_HEADER.size:
        return 0, len(content)
    magic, _, page_bytes, _, salt_1, salt_2, *expected = WAL_HEADER.unpack_from(content)
    order = ">" if magic & 1 else "<"
    sums = _sums((0, 0), content[:24], order)
    if magic not in MAGICS or sums != tuple(expected) or page_bytes not in PAGE_BYTES:
        return 0, len(content)
    place, num_transactions, last_whole = WAL_HEADER.size, 0, WAL_HEADER.size
    frame_bytes = FRAME_HEADER.size + page_bytes
    while place + FRAME_HEADER.size <= len(content):
        _, pages_after, found_1, found_2, *expected = FRAME_HEADER.unpack_from(content, place)
        if (found_1, found_2) != (salt_1, salt_2):
            break  # from an earlier pass of the log
        frame = content[place : place + frame_bytes]
        sums = _sums(_sums(sums, frame[:8], order), frame[FRAME_HEADER.size :], order)
        if len(frame) < frame_bytes or sums != tuple(expected):
            return num_transactions, _end_of_turn(content, place, (salt_1, salt_2), frame_bytes) - last_whole
        place += frame_bytes
        if pages_after:
            num_transactions, last_whole = num_transactions + 1, place
    end = len(content) if len(content) - place < FRAME_HEADER.size else place
    return num_transactions, end - last_whole


def _end_of_turn(content: bytes, place: int, salts: tuple[int, int], frame_bytes: int) -> int:
    """Return the offset at which frames with these salts end."""
    while place + FRAME_HEADER.size <= len(content):
        if FRAME_HEADER.unpack_from(content, place)[2:4] != salts:
            return place
        place += frame_bytes
    return len(content)


def _sums(start: tuple[int, int], content: bytes, order: str) -> tuple[int, int]:
    """Return SQLite's checksum: two sums modulo 2**32, each including the other."""
    first, second = start
    whole = content[: len(content) // 8 * 8]
    for one, two in np.frombuffer(whole, dtype=f"{order}u4").reshape(-1, 2).tolist():
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + two + first) & 0xFFFFFFFF
    return first, second
