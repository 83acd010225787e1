"""Storage of rows while a queue holds them."""

from typing import Any, NamedTuple, Protocol

from rl_core.data.batch import Batch
from rl_core.data.segment import plan_segment

INLINE_BYTES = 1 << 16
"""Maximum size of a segment that is sent inline in its message, without a separate place."""


class Prepared(NamedTuple):
    """A batch that is ready to be written.

    Attributes:
        place: The inlined batch, sent in its message; None if it needs another place.
        size_bytes: Size of the separate place that it otherwise needs.
        plan: Layout for writing it.
    """

    place: Any
    size_bytes: int
    plan: Any


def prepare_segment(batch: Batch) -> Prepared:
    """Plan a batch's layout as a segment, which is inlined in its message if small."""
    plan = plan_segment(batch)
    return Prepared(plan.as_bytes() if plan.size_bytes <= INLINE_BYTES else None, plan.size_bytes, plan)


class Payload(Protocol):
    """Writes and reads rows for a client of a queue.

    Attributes:
        is_slow: True if reads are slow enough to benefit from several threads.
    """

    is_slow: bool

    def prepare(self, batch: Batch) -> Prepared:
        """Plan a batch's layout."""
        ...

    def write(self, prepared: Prepared, place: Any) -> Any:
        """Write a batch to a place; return its new place, or None if the place is unchanged."""
        ...

    def read(self, number: int, place: Any) -> Batch:
        """Read the batch at a place.

        Raises:
            SegmentError: The segment cannot be read; its rows are generated again.
        """
        ...


class HeldRows:
    """Rows in this process's memory, without copies."""

    is_slow = False

    def prepare(self, batch: Batch) -> Prepared:
        """Use the batch as its own place."""
        return Prepared(batch, 0, None)

    def write(self, prepared: Prepared, place: Any) -> Any:
        """Raise an error: rows are their own place, so this is never called."""
        raise NotImplementedError

    def read(self, number: int, place: Any) -> Batch:  # noqa: ARG002
        """Return the batch itself."""
        batch: Batch = place
        return batch
