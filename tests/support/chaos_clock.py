"""The wall clock of this interpreter, moved by what the file in `CHAOS_CLOCK` says; other clocks are left alone.

libfaketime would also move it for C libraries, but with it `time.sleep` fails after the clock went back.
"""

import mmap
import os
import struct
import time
from pathlib import Path

VARIABLE = "CHAOS_CLOCK"
OFFSET_S = struct.Struct("q")


def install() -> None:
    """Move `time.time` and `time.time_ns`, where the environment says so."""
    if VARIABLE not in os.environ:
        return
    with Path(os.environ[VARIABLE]).open("rb") as file:
        offset = mmap.mmap(file.fileno(), OFFSET_S.size, access=mmap.ACCESS_READ)
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + OFFSET_S.unpack(offset[:])[0]
    time.time_ns = lambda: true_time_ns() + OFFSET_S.unpack(offset[:])[0] * 1_000_000_000
