"""Capacity of a queue: stored rows, reservations for rows being written, and admission of new rows."""

import time
from collections.abc import Callable, Set
from typing import Any, NamedTuple, Protocol

from rl_core.errors import NotReadyError
from rl_core.queue.core import QueueCore
from rl_core.queue.messages import GENERATE, Reserve


class SegmentStore(Protocol):
    """Allocates places for segments, for clients that do not provide their own."""

    def allocate(self, size_bytes: int, client: str) -> Any:
        """Return a place for a segment, such as a file's name; None if the client chooses one.

        Raises:
            JournalError: No space is left.
        """
        ...

    def free(self, place: Any) -> None:
        """Free a segment's place."""
        ...

    def check(self, place: Any) -> None:
        """Check a segment that an earlier server stored.

        Raises:
            SegmentError: The segment is missing, truncated or altered.
        """
        ...

    def remove_others(self, places: list[Any]) -> int:
        """Remove all segments except those at these places, and return how many were removed."""
        ...


class Reservation(NamedTuple):
    """Capacity reserved for a client that is writing."""

    client: str
    request: Reserve
    place: Any
    ends_at: float


class Capacity:
    """Reservations and capacity limits of a queue."""

    def __init__(self, store: SegmentStore | None, *, reservation_s: float) -> None:
        """Start without reservations.

        Args:
            store: Allocates segments; None if requests provide them.
            reservation_s: Maximum seconds for a client to write, for clients whose death cannot be detected.
        """
        self._store = store
        self._reservation_s = reservation_s
        self._reservations: dict[int, Reservation] = {}
        self._number = 0
        self.num_rows = 0
        self.size_bytes = 0

    @property
    def clients(self) -> list[str]:
        """The clients that hold reservations."""
        return sorted({held.client for held in self._reservations.values()})

    def fits(self, core: QueueCore, num_rows: int, size_bytes: int, *, waiting_tasks: Set[str]) -> bool:
        """Return True if rows fit, or if waiting for space could last forever.

        Waiting could last forever while nothing is settled, and while no lease is running and every task with ready
        groups has a consumer that waits for more groups than are ready.

        Args:
            core: The queue's state and bounds.
            num_rows: Number of new rows.
            size_bytes: Size of the new rows.
            waiting_tasks: Tasks that have a waiting consumer.
        """
        groups, options = core.groups, core.options
        rows, size = groups.num_rows + self.num_rows + num_rows, groups.size_bytes + self.size_bytes + size_bytes
        fits_rows = options.capacity_rows is None or rows <= options.capacity_rows
        fits_bytes = options.capacity_bytes is None or size <= options.capacity_bytes
        if (fits_rows and fits_bytes) or num_rows == 0:
            return True
        if groups.groups_in["settled"] == 0:
            return True
        waiting = waiting_tasks & groups.tasks.keys()
        with_ready = {name for name, task in groups.tasks.items() if task.num_ready}
        is_worked_on = any(lease.task.name != GENERATE for lease in core.leases.values())
        return bool(waiting) and with_ready <= waiting and not is_worked_on

    def reserve(self, request: Reserve, client: str) -> tuple[int, Any]:
        """Reserve capacity for rows to be written; return the reservation's number and a place.

        Raises:
            JournalError: No space is left.
        """
        place = None if self._store is None else self._store.allocate(request.segment_bytes, client)
        self._number += 1
        self._reservations[self._number] = Reservation(client, request, place, time.monotonic() + self._reservation_s)
        self.num_rows += request.num_rows
        self.size_bytes += request.size_bytes
        return self._number, place

    def find(self, number: int) -> Reservation:
        """Return a reservation.

        Raises:
            NotReadyError: The reservation is unknown, because the queue was reopened.
        """
        held = self._reservations.get(number)
        if held is None:
            raise NotReadyError(f"reservation {number} is unknown; reserve again.")
        return held

    def end(self, number: int) -> Reservation:
        """End a reservation whose place now belongs to a segment or is freed."""
        held = self._reservations.pop(number)
        self.num_rows -= held.request.num_rows
        self.size_bytes -= held.request.size_bytes
        return held

    def give_up(self, number: int, written: Any = None) -> None:
        """Free a reservation's place if it still exists, or the place that its client wrote to instead."""
        if number in self._reservations:
            self.free(self.end(number).place or written)

    def give_up_late(self, note: Callable[[str], None]) -> None:
        """Free the places of expired reservations."""
        while self._reservations:
            number, held = next(iter(self._reservations.items()))
            if held.ends_at > time.monotonic():
                return
            self.give_up(number)
            note(f"the reservation of {held.client} expired")

    def give_up_of(self, client: str) -> None:
        """Free the places of a client that has ended."""
        for number in [number for number, held in self._reservations.items() if held.client == client]:
            self.give_up(number)

    def free(self, place: Any) -> None:
        """Free a segment."""
        if self._store is not None:
            self._store.free(place)
