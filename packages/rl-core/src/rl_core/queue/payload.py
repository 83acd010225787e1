"""Where rows lie while a queue holds them."""

from typing import Any, NamedTuple, Protocol

from rl_core.data.batch import Batch
from rl_core.data.segment import plan_segment

INLINE_BYTES = 1 << 16
"""Segments up to this size travel with the message that announces them, and need no place of their own."""


class Prepared(NamedTuple):
    """A batch that is ready to be written.

    Attributes:
        place: Where it is, when it needs no other place; it travels with the message that announces it.
        size_bytes: How large a place it needs otherwise.
        plan: How it is written.
    """

    place: Any
    size_bytes: int
    plan: Any


def prepare_segment(batch: Batch) -> Prepared:
    """Lay a batch out as a segment, which travels with its message where it is small."""
    plan = plan_segment(batch)
    return Prepared(plan.as_bytes() if plan.size_bytes <= INLINE_BYTES else None, plan.size_bytes, plan)


class Payload(Protocol):
    """How a client of a queue writes and reads rows.

    Attributes:
        is_slow: Reading takes long enough to be done by several threads.
    """

    is_slow: bool

    def prepare(self, batch: Batch) -> Prepared:
        """Lay a batch out."""
        ...

    def write(self, prepared: Prepared, place: Any) -> Any:
        """Write a batch to a place; gives where it is, or None when the place says it."""
        ...

    def read(self, number: int, place: Any) -> Batch:
        """The batch at a place.

        Raises:
            SegmentError: It cannot be read; its rows are generated again.
        """
        ...


class HeldRows:
    """Rows in this process's memory, held as they are."""

    is_slow = False

    def prepare(self, batch: Batch) -> Prepared:
        """The batch is its place."""
        return Prepared(batch, 0, None)

    def write(self, prepared: Prepared, place: Any) -> Any:
        """Never called: rows are their own place."""
        raise NotImplementedError

    def read(self, number: int, place: Any) -> Batch:  # noqa: ARG002
        """The batch itself."""
        batch: Batch = place
        return batch
