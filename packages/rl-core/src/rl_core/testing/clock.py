"""Time in tests: a clock that stands still, and waits for conditions."""

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
    """Seconds that pass only when a test says so, in every process that it is sent to."""

    def __init__(self, now: float = 1000.0) -> None:
        """Stand still at `now`."""
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
        """The same clock elsewhere on this host."""
        return FakeClock._at, (self._path,)

    def __call__(self) -> float:
        """The time now."""
        self.num_reads += 1
        now: float = NOW.unpack_from(self._memory)[0]
        return now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        NOW.pack_into(self._memory, 0, NOW.unpack_from(self._memory)[0] + seconds)


def wait_until(condition: Callable[[], bool], what: str, *, deadline_s: float = 60.0) -> None:
    """Wait for a condition that nothing announces.

    Raises:
        TimeoutError: It did not come true; the message says what was waited for.
    """
    ends_at = time.monotonic() + deadline_s
    never = threading.Event()
    while not condition():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"waited {deadline_s:g} s for {what}.")
        never.wait(0.002)
