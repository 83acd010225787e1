"""Which segments there are, who needs them, and who looks at them."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Segment:
    """Where rows lie, in the backend's terms; freed when no group needs it and no client looks at it."""

    place: Any
    needed_by: int = 0
    pins: Counter[str] = field(default_factory=Counter)


class SegmentTable:
    """Segments by number; `added` and `freed` have what a journal must note, and a store may reuse after that."""

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
        """Enter what a journal has; `free_unneeded` follows, once all groups have said what they need."""
        self._segments = {n: Segment(place, pins=Counter(pins.get(n, {}))) for n, place in places.items()}
        self._numbers = itertools.count(max(places, default=0) + 1)

    def number_from(self, number: int) -> None:
        """Number segments from here on: those of an earlier life of the queue may still be looked at."""
        self._numbers = itertools.count(max(number, max(self._segments, default=0) + 1))

    def number_after(self, old: "SegmentTable") -> None:
        """Continue the numbers of another table."""
        self._numbers = old._numbers

    def free_unneeded(self) -> None:
        """Free every segment that nobody needs."""
        for number in list(self._segments):
            self._free(number)

    def pins(self) -> dict[int, Counter[str]]:
        """Who looks at which segment, and how often."""
        return {number: segment.pins for number, segment in self._segments.items() if segment.pins}

    def add(self, place: Any) -> int:
        """Enter a segment."""
        number = next(self._numbers)
        self._segments[number] = Segment(place)
        self.added.append(number)
        return number

    def place(self, number: int) -> Any:
        """Where it lies."""
        return self._segments[number].place

    def need(self, number: int) -> None:
        """Count one more part of a group in it."""
        self._segments[number].needed_by += 1

    def release(self, number: int) -> None:
        """Count one part less."""
        self._segments[number].needed_by -= 1
        self._free(number)

    def pin(self, number: int, client: str) -> None:
        """A client looks at it."""
        self._segments[number].pins[client] += 1

    def unpin(self, number: int, client: str) -> None:
        """A client has looked at it."""
        segment = self._segments.get(number)
        if segment is not None:
            segment.pins[client] -= 1
            if segment.pins[client] <= 0:
                del segment.pins[client]
            self._free(number)

    def unpin_all(self, client: str) -> None:
        """A client is gone."""
        for number in [number for number, segment in self._segments.items() if client in segment.pins]:
            del self._segments[number].pins[client]
            self._free(number)

    def _free(self, number: int) -> None:
        segment = self._segments[number]
        if segment.needed_by <= 0 and not segment.pins:
            del self._segments[number]
            self.freed.append((number, segment.place))
