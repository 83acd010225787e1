"""A table of segments with counts of the groups and clients that use them."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Segment:
    """A place of rows, in the backend's terms; freed when no group needs it and no client reads it."""

    place: Any
    needed_by: int = 0
    pins: Counter[str] = field(default_factory=Counter)


class SegmentTable:
    """Segments by number; `added` and `freed` are for the journal, after which a store may reuse the freed ones."""

    def __init__(self) -> None:
        """Start empty."""
        self._segments: dict[int, Segment] = {}
        self._numbers = itertools.count(1)
        self.added: list[int] = []
        self.freed: list[tuple[int, Any]] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self._segments)

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    def restore(self, places: Mapping[int, Any], pins: Mapping[int, Counter[str]]) -> None:
        """Restore a journal's segments; call `free_unneeded` once all groups have registered their needs."""
        self._segments = {n: Segment(place, pins=Counter(pins.get(n, {}))) for n, place in places.items()}
        self._numbers = itertools.count(max(places, default=0) + 1)

    def number_from(self, number: int) -> None:
        """Set the next segment number; clients may still read segments of an earlier server."""
        self._numbers = itertools.count(max(number, max(self._segments, default=0) + 1))

    def number_after(self, old: "SegmentTable") -> None:
        """Continue the numbers of another table."""
        self._numbers = old._numbers

    def free_unneeded(self) -> None:
        """Free every unused segment."""
        for number in list(self._segments):
            self._free(number)

    def pins(self) -> dict[int, Counter[str]]:
        """Return how often each client has pinned each segment."""
        return {number: segment.pins for number, segment in self._segments.items() if segment.pins}

    def add(self, place: Any) -> int:
        """Add a segment."""
        number = next(self._numbers)
        self._segments[number] = Segment(place)
        self.added.append(number)
        return number

    def place(self, number: int) -> Any:
        """Return a segment's place."""
        return self._segments[number].place

    def need(self, number: int) -> None:
        """Count one more part of a group in a segment."""
        self._segments[number].needed_by += 1

    def release(self, number: int) -> None:
        """Count one part less in a segment."""
        self._segments[number].needed_by -= 1
        self._free(number)

    def pin(self, number: int, client: str) -> None:
        """Record that a client reads a segment."""
        self._segments[number].pins[client] += 1

    def unpin(self, number: int, client: str) -> None:
        """Record that a client no longer reads a segment."""
        segment = self._segments.get(number)
        if segment is not None:
            segment.pins[client] -= 1
            if segment.pins[client] <= 0:
                del segment.pins[client]
            self._free(number)

    def unpin_all(self, client: str) -> None:
        """Remove all pins of a client that has ended."""
        for number in [number for number, segment in self._segments.items() if client in segment.pins]:
            del self._segments[number].pins[client]
            self._free(number)

    def _free(self, number: int) -> None:
        segment = self._segments[number]
        if segment.needed_by <= 0 and not segment.pins:
            del self._segments[number]
            self.freed.append((number, segment.place))
