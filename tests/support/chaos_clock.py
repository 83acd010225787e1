"""Shift this interpreter's wall clock by the offset in the file `CHAOS_CLOCK`; other clocks do not change.

libfaketime would also shift it for C libraries, but with it `time.sleep` fails after the clock moves backwards.
"""

import mmap
import os
import struct
import time
from pathlib import Path

VARIABLE = "CHAOS_CLOCK"
OFFSET_S = struct.Struct("q")


def install() -> None:
    """Shift `time.time` and `time.time_ns`, if the environment asks for it."""
    if VARIABLE not in os.environ:
        return
    with Path(os.environ[VARIABLE]).open("rb") as file:
        offset = mmap.mmap(file.fileno(), OFFSET_S.size, access=mmap.ACCESS_READ)
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + OFFSET_S.unpack(offset[:])[0]
    time.time_ns = lambda: true_time_ns() + OFFSET_S.unpack(offset[:])[0] * 1_000_000_000
