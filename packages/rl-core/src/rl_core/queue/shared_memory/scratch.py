"""Anonymous memory that one process fills and another on the same host maps; nothing remains after both end.

Ray copies an actor's argument into its object store, and the actor copies it again to own it. A scratch replaces the
first copy with one into already touched memory, which the actor maps.
"""

import mmap
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_core.queue.shared_memory.slots import capacity_for

MAX_MAPPED = 64
"""Maximum number of scratches that a reader keeps mapped."""


class ScratchName(NamedTuple):
    """Identifies a scratch for other processes on the host; `token` is unique."""

    pid: int
    descriptor: int
    token: str
    capacity: int


class Scratch:
    """Memory of this process that other processes of its user can map."""

    def __init__(self, capacity: int) -> None:
        """Allocate the memory.

        Raises:
            OSError: No memory is left.
        """
        self._descriptor = os.memfd_create("rl-queue-scratch", os.MFD_CLOEXEC)
        os.posix_fallocate(self._descriptor, 0, capacity)
        self.memory = mmap.mmap(self._descriptor, capacity)
        self.name = ScratchName(os.getpid(), self._descriptor, uuid.uuid4().hex, capacity)

    def close(self) -> None:
        """Free the memory."""
        os.close(self._descriptor)


class Scratches:
    """A pool of reusable scratches for the threads of a process."""

    def __init__(self) -> None:
        """Start without scratches."""
        self._idle: list[Scratch] = []
        self._lock = threading.Lock()

    @contextmanager
    def take(self, size_bytes: int) -> Iterator[Scratch]:
        """Lend a large enough scratch until the end of the `with` block."""
        with self._lock:
            scratch = self._idle.pop() if self._idle else None
        if scratch is not None and scratch.name.capacity < size_bytes:
            scratch.close()
            scratch = None
        scratch = scratch or Scratch(capacity_for(size_bytes))
        try:
            yield scratch
        except BaseException:
            scratch.close()  # its reader may still use it
            raise
        with self._lock:
            self._idle.append(scratch)


@lru_cache(MAX_MAPPED)
def mapped_scratch(name: ScratchName) -> NDArray[np.uint8]:
    """Return the memory of another process's scratch; the most recent ones stay mapped.

    Raises:
        OSError: The scratch's process has ended, or access to it is denied.
    """
    descriptor = os.open(f"/proc/{name.pid}/fd/{name.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, name.capacity, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, dtype=np.uint8)
