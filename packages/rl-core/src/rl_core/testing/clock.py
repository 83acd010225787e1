"""Time in tests: a manual clock, and waits for conditions."""

import mmap
import os
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOW = struct.Struct("d")


class FakeClock:
    """A clock that advances only when a test calls `advance`, shared by all processes that receive it."""

    def __init__(self, now: float = 1000.0) -> None:
        """Start at `now`."""
        descriptor, path = tempfile.mkstemp(prefix="fake-clock-")
        os.write(descriptor, NOW.pack(now))
        os.close(descriptor)
        self._open(path)
        weakref.finalize(self, Path(path).unlink, missing_ok=True)

    def _open(self, path: str) -> None:
        self._path = path
        self.num_reads = 0
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NOW.size)

    @classmethod
    def _at(cls, path: str) -> "FakeClock":
        self = cls.__new__(cls)
        self._open(path)
        return self

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Pickle as the same clock, within this host."""
        return FakeClock._at, (self._path,)

    def __call__(self) -> float:
        """Return the current time in seconds."""
        self.num_reads += 1
        now: float = NOW.unpack_from(self._memory)[0]
        return now

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        NOW.pack_into(self._memory, 0, NOW.unpack_from(self._memory)[0] + seconds)


def wait_until(condition: Callable[[], bool], what: str, *, deadline_s: float = 60.0) -> None:
    """Poll until a condition holds.

    Raises:
        TimeoutError: The condition did not become true in time; the message names it.
    """
    ends_at = time.monotonic() + deadline_s
    never = threading.Event()
    while not condition():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"timed out after {deadline_s:g} s waiting for {what}.")
        never.wait(0.002)
