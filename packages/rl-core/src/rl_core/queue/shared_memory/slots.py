"""Memory for segments: files that are mapped, filled and reused.

The first touch of memory costs several times as much as a copy into it, so the next segment of the same size reuses the
most recently freed slot. Slots in /dev/shm are shared memory; slots in a journal's directory use the page cache and
survive a crash.
"""

import errno
import mmap
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data.batch import Batch
from rl_core.data.segment import decode_segment, segment_size
from rl_core.errors import JournalError, SegmentError
from rl_core.queue.rows import Prepared, prepare_segment

SMALLEST_BYTES = 1 << 16
SPARE_BYTES = 1 << 30
"""Maximum total size of free slots; further freed slots are removed."""

SLOT_NAME = re.compile(r"[0-9A-Za-z-]{1,100}\.slot")
MAX_CAPACITY = 1 << 62

OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

SlotPlace = list[Any]
"""Name and capacity of a slot."""


class SlotPool:
    """The server's side: all slots, and the set of free ones."""

    def __init__(self, folder: Path, *, spare_bytes: int = SPARE_BYTES) -> None:
        """Own a folder of slots; existing slots are kept until they are freed, and are never reused.

        A process that outlived the last server may still read them.

        Raises:
            JournalError: The folder cannot be created.
        """
        self._folder = folder
        self._spare_bytes = spare_bytes
        self._free: dict[int, list[tuple[str, str]]] = {}
        self._users: dict[str, str] = {}
        self._free_bytes = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise JournalError(f"{folder} cannot be used for slots: {error.strerror}.") from error
        self._token = secrets.token_hex(4)  # names are never reused: clients may have old slots mapped
        self._number = 0

    def allocate(self, size_bytes: int, client: str) -> SlotPlace:
        """Allocate a slot for a segment, preferably one that this client used last and has mapped.

        Raises:
            JournalError: No space is left.
        """
        capacity = capacity_for(size_bytes)
        free = self._free.get(capacity)
        if free:
            index = next((i for i in reversed(range(len(free))) if free[i][1] == client), len(free) - 1)
            name, _ = free.pop(index)
            self._free_bytes -= capacity
        else:
            self._number += 1
            name = f"{self._token}-{self._number}-{capacity}.slot"
            self._make(name, capacity)
        self._users[name] = client
        return [name, capacity]

    def free(self, place: Any) -> None:
        """Free a slot; an inlined segment has none."""
        if not is_slot(place):
            return
        name, capacity = place
        user = self._users.pop(name, None)
        if user is None or self._free_bytes + capacity > self._spare_bytes:
            (self._folder / name).unlink(missing_ok=True)
            return
        self._free.setdefault(capacity, []).append((name, user))
        self._free_bytes += capacity

    def check(self, place: Any) -> None:
        """Check an existing slot's size, header and schema.

        Raises:
            SegmentError: The slot is missing, truncated or altered.
        """
        if not isinstance(place, bytes):
            segment_size(map_slot(self._folder, place))

    def remove_others(self, places: list[Any]) -> int:
        """Remove all other slots and return their number; open views stay valid."""
        kept = {place[0] for place in places if isinstance(place, list)}
        others = [path for path in self._folder.glob("*.slot") if path.name not in kept]
        for path in others:
            path.unlink(missing_ok=True)
        return len(others)

    def _make(self, name: str, capacity: int) -> None:
        path = self._folder / name
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            os.posix_fallocate(descriptor, 0, capacity)  # otherwise a full disk would kill the writer later
        except OSError as error:
            path.unlink(missing_ok=True)
            is_full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM)
            advice = " Free space, or set capacity_bytes." if is_full else ""
            raise JournalError(f"no space for {capacity} bytes in {self._folder}: {error.strerror}.{advice}") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)


class SlotRows:
    """The client's side: rows in slots; small segments are inlined in messages."""

    is_slow = True

    def __init__(self, folder: Path, unpin: Callable[[int], None]) -> None:
        """Read and write slots in a folder.

        Args:
            folder: Folder of the slots.
            unpin: Called with a segment's number once no view of it exists, from any thread.
        """
        self._folder = folder
        self._unpin = unpin
        self._maps: dict[str, NDArray[np.uint8]] = {}
        self._views: weakref.WeakValueDictionary[tuple[int, str], NDArray[np.uint8]] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    prepare = staticmethod(prepare_segment)

    def write(self, prepared: Prepared, place: Any) -> Any:
        """Write a segment into a slot."""
        prepared.plan.write(self._mapped(place))

    def read(self, number: int, place: Any) -> Batch:
        """Read a segment as views of its slot, which does not change while any view exists."""
        if not isinstance(place, list):
            return decode_segment(place)
        known = self._views.get((number, place[0]))
        if known is not None:
            self._unpin(number)  # the view already has a pin
            return decode_segment(known, is_verified=True)
        try:
            memory: NDArray[np.uint8] = np.frombuffer(self._mapped(place).data, dtype=np.uint8)
            batch = decode_segment(memory)
        except BaseException:
            self._unpin(number)
            raise
        self._views[number, place[0]] = memory
        weakref.finalize(memory, self._unpin, number).atexit = False
        return batch

    def _mapped(self, place: SlotPlace) -> NDArray[np.uint8]:
        with self._lock:
            found = self._maps.get(place[0])
            if found is None:
                for name in [name for name in self._maps if not (self._folder / name).exists()]:
                    del self._maps[name]
                found = self._maps[place[0]] = map_slot(self._folder, place)
            return found


def is_slot(place: Any) -> bool:
    """Return True for a valid slot name, which cannot refer to a file outside the folder."""
    match place:
        case [str(name), int(capacity)]:
            return SLOT_NAME.fullmatch(name) is not None and 1 <= capacity <= MAX_CAPACITY
    return False


def map_slot(folder: Path, place: SlotPlace) -> NDArray[np.uint8]:
    """Map a slot.

    Raises:
        SegmentError: The slot is missing or too short.
    """
    if not is_slot(place):
        raise SegmentError(f"a slot must be given as file name and size; found {place!r}.")
    name, capacity = place
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in OWN_LIMITS:
            raise  # this process has too many open files; the rows are intact
        raise SegmentError(f"slot {name} of {folder} cannot be opened: {error.strerror}.") from error
    try:
        found = os.fstat(descriptor).st_size
        if found < capacity:
            raise SegmentError(f"slot {name} of {folder} must have {capacity} bytes; found {found}.")
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return np.frombuffer(mmap.mmap(descriptor, capacity, flags=flags), dtype=np.uint8)
    finally:
        os.close(descriptor)


def capacity_for(size_bytes: int) -> int:
    """Return the slot size for a segment: four sizes per power of two, so at most a quarter is unused."""
    size = max(size_bytes, SMALLEST_BYTES)
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step
