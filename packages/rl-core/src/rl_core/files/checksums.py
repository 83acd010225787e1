"""crc32c, the checksum of everything that is stored or sent; the one file that knows its library."""

import crc32c as _crc32c
import numpy as np
from numpy.typing import NDArray


def checksum(buffer: bytes | bytearray | memoryview | NDArray[np.generic], start: int = 0) -> int:
    """crc32c of contiguous memory, going on from `start`; releases the interpreter while it computes."""
    if isinstance(buffer, np.ndarray):
        buffer = buffer.reshape(-1).view(np.uint8)
    return int(_crc32c.crc32c(buffer, start))
