"""The crc32c checksum of stored and sent data; the only file that imports its library."""

import crc32c as _crc32c
import numpy as np
from numpy.typing import NDArray


def checksum(buffer: bytes | bytearray | memoryview | NDArray[np.generic], start: int = 0) -> int:
    """Return the crc32c of contiguous memory, continued from `start`; releases the GIL during computation."""
    if isinstance(buffer, np.ndarray):
        buffer = buffer.reshape(-1).view(np.uint8)
    return int(_crc32c.crc32c(buffer, start))
