"""Memory that one process fills and another of the same host reads: no name, so nothing is left when both are gone.

Ray copies what is given to an actor into its object store, and the actor copies it once more to own it. The first copy
is better made into memory that was touched before, which the actor maps.
"""

import mmap
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_core.queue.shared_memory.slots import capacity_for

MAX_MAPPED = 64
"""Scratches that a reader keeps mapped."""


class ScratchName(NamedTuple):
    """How another process of the host finds a scratch; `token` is never used twice."""

    pid: int
    descriptor: int
    token: str
    capacity: int


class Scratch:
    """Memory of this process that others of its user can map."""

    def __init__(self, capacity: int) -> None:
        """Allocate it.

        Raises:
            OSError: There is no memory left.
        """
        self._descriptor = os.memfd_create("rl-queue-scratch", os.MFD_CLOEXEC)
        os.posix_fallocate(self._descriptor, 0, capacity)
        self.memory = mmap.mmap(self._descriptor, capacity)
        self.name = ScratchName(os.getpid(), self._descriptor, uuid.uuid4().hex, capacity)

    def close(self) -> None:
        """Let it go."""
        os.close(self._descriptor)


class Scratches:
    """Scratches for the threads of a process, used again."""

    def __init__(self) -> None:
        """Start with none."""
        self._idle: list[Scratch] = []
        self._lock = threading.Lock()

    @contextmanager
    def take(self, size_bytes: int) -> Iterator[Scratch]:
        """One that is large enough, until the end of the block."""
        with self._lock:
            scratch = self._idle.pop() if self._idle else None
        if scratch is not None and scratch.name.capacity < size_bytes:
            scratch.close()
            scratch = None
        scratch = scratch or Scratch(capacity_for(size_bytes))
        try:
            yield scratch
        except BaseException:
            scratch.close()  # its reader may still be at it
            raise
        with self._lock:
            self._idle.append(scratch)


class MappedScratches:
    """The reader's side: scratches of other processes, the ones used last kept mapped."""

    def __init__(self) -> None:
        """Start with none."""
        self._maps: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def view(self, name: ScratchName) -> NDArray[np.uint8]:
        """The memory of a scratch.

        Raises:
            OSError: Its process is gone, or may not be looked into.
        """
        with self._lock:
            if name.token not in self._maps:
                descriptor = os.open(f"/proc/{name.pid}/fd/{name.descriptor}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    memory = mmap.mmap(descriptor, name.capacity, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                finally:
                    os.close(descriptor)
                self._maps[name.token] = np.frombuffer(memory, dtype=np.uint8)
            self._maps.move_to_end(name.token)
            if len(self._maps) > MAX_MAPPED:
                self._maps.popitem(last=False)
            return self._maps[name.token]
