"""Where rows lie while a queue holds them."""

from typing import Any, Protocol

from rl_core.batch import Batch

INLINE_BYTES = 1 << 16
"""Segments up to this size travel with the message that announces them, and need no room of their own."""


class Payload(Protocol):
    """How a client of a queue writes and reads rows."""

    def place_now(self, batch: Batch) -> Any:
        """What tells where a batch is, or None when room is needed first."""
        ...

    def segment_bytes(self, batch: Batch) -> int:
        """How much room it needs."""
        ...

    def write(self, batch: Batch, place: Any) -> Any:
        """Write a batch into room; gives where it is, or None when the room itself says it."""
        ...

    def read(self, number: int, place: Any) -> Batch:
        """The batch at a place.

        Raises:
            SegmentError: It cannot be read; its rows are generated again.
        """
        ...


class HeldRows:
    """Rows in this process's memory, held as they are."""

    def place_now(self, batch: Batch) -> Any:
        """The batch itself."""
        return batch

    def segment_bytes(self, batch: Batch) -> int:
        """Nothing more than the batch."""
        return 0

    def write(self, batch: Batch, place: Any) -> Any:
        """Never called: rows need no room."""
        raise NotImplementedError

    def read(self, number: int, place: Any) -> Batch:
        """The batch itself."""
        batch: Batch = place
        return batch
