"""Capacity of a queue: what is held, what is reserved for rows that are being written, and who may come in."""

import time
from collections.abc import Callable, Set
from typing import Any, NamedTuple, Protocol

from rl_core.errors import NotReadyError
from rl_core.queue.core import QueueCore
from rl_core.queue.messages import GENERATE, Reserve


class SegmentStore(Protocol):
    """Where segments of a certain size can be written, for clients that do not bring their own."""

    def allocate(self, size_bytes: int, client: str) -> Any:
        """A place for a segment, such as a file's name; None where the client names one.

        Raises:
            JournalError: There is no space left.
        """
        ...

    def free(self, place: Any) -> None:
        """The segment there is needed no longer."""
        ...

    def check(self, place: Any) -> None:
        """Look at a segment that was there before.

        Raises:
            SegmentError: It is missing, torn or altered.
        """
        ...

    def remove_others(self, places: list[Any]) -> int:
        """Remove what lies at none of these places, and say how many segments that was."""
        ...


class Reservation(NamedTuple):
    """What a client is writing."""

    client: str
    request: Reserve
    place: Any
    ends_at: float


class Capacity:
    """Reservations, and the bounds of a queue."""

    def __init__(self, store: SegmentStore | None, *, reservation_s: float) -> None:
        """Nothing is reserved yet.

        Args:
            store: Where segments are; None where requests bring them.
            reservation_s: How long a client may take to write, where nothing tells that it is gone.
        """
        self._store = store
        self._reservation_s = reservation_s
        self._reservations: dict[int, Reservation] = {}
        self._number = 0
        self.num_rows = 0
        self.size_bytes = 0

    @property
    def clients(self) -> list[str]:
        """Who writes."""
        return sorted({held.client for held in self._reservations.values()})

    def fits(self, core: QueueCore, num_rows: int, size_bytes: int, *, waiting_tasks: Set[str]) -> bool:
        """True when rows fit, or when waiting for them to fit could last for ever.

        That is so while nothing is settled, and while no consumer is at work and each task for which something is
        ready has one that waits for more than there is.

        Args:
            core: What is held, and the bounds.
            num_rows: Rows that want in.
            size_bytes: Their bytes.
            waiting_tasks: Tasks with a waiting consumer.
        """
        groups, options = core.groups, core.options
        rows, size = groups.num_rows + self.num_rows + num_rows, groups.size_bytes + self.size_bytes + size_bytes
        fits_rows = options.capacity_rows is None or rows <= options.capacity_rows
        fits_bytes = options.capacity_bytes is None or size <= options.capacity_bytes
        if (fits_rows and fits_bytes) or num_rows == 0:
            return True
        if groups.num_in("settled") == 0:
            return True
        waiting = waiting_tasks & groups.tasks.keys()
        with_ready = {name for name, task in groups.tasks.items() if task.num_ready}
        is_worked_on = any(lease.task.name != GENERATE for lease in core.leases.values())
        return bool(waiting) and with_ready <= waiting and not is_worked_on

    def reserve(self, request: Reserve, client: str) -> tuple[int, Any]:
        """Count rows that will be written; gives the reservation's number and a place.

        Raises:
            JournalError: There is no space left.
        """
        place = None if self._store is None else self._store.allocate(request.segment_bytes, client)
        self._number += 1
        self._reservations[self._number] = Reservation(client, request, place, time.monotonic() + self._reservation_s)
        self.num_rows += request.num_rows
        self.size_bytes += request.size_bytes
        return self._number, place

    def find(self, number: int) -> Reservation:
        """A reservation.

        Raises:
            NotReadyError: Unknown, because the queue was reopened meanwhile.
        """
        held = self._reservations.get(number)
        if held is None:
            raise NotReadyError(f"reservation {number} is not known; reserve again.")
        return held

    def end(self, number: int) -> Reservation:
        """Let go of a reservation: its place is a segment's now, or is freed."""
        held = self._reservations.pop(number)
        self.num_rows -= held.request.num_rows
        self.size_bytes -= held.request.size_bytes
        return held

    def give_up(self, number: int, written: Any = None) -> None:
        """Free the place of a reservation, if it is still there, or what was written elsewhere for it."""
        if number in self._reservations:
            self.free(self.end(number).place or written)

    def give_up_late(self, note: Callable[[str], None]) -> None:
        """Free the places of those that took too long."""
        while self._reservations:
            number, held = next(iter(self._reservations.items()))
            if held.ends_at > time.monotonic():
                return
            self.give_up(number)
            note(f"what {held.client} reserved was given up")

    def give_up_of(self, client: str) -> None:
        """Free the places of a client that is gone."""
        for number in [number for number, held in self._reservations.items() if held.client == client]:
            self.give_up(number)

    def free(self, place: Any) -> None:
        """A segment is needed no longer."""
        if self._store is not None:
            self._store.free(place)
