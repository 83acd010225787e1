"""Producers and consumers of this project's queue in the transfer benchmark, for every backend."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _payload import COLUMNS, NUM_PRODUCERS, NUM_SAMPLES, Rows, look, make_rows, producer_rows, small_row
from _timing import LEAD_S, times_ms, wait_until

from rl_core import Batch, Lease, Prompt, Ragged, RowKey, TaskSpec, TransferQueue
from rl_core.data import ColumnSpec, declare_column, offsets_of

CALL_TIMEOUT_S = 120.0
GROUP_SIZE = 8
CHUNK_ROWS = 2_000
"""Rows per put if only their number matters."""
NAMES = {name: f"bench_{name}" for name in COLUMNS}
DTYPES = {"input_ids": "int64", "position_ids": "int64", "logprobs": "float32", "mask": "int8"}
TASK = TaskSpec(name="train", needs=frozenset())


def declare() -> None:
    """Declare the payload's columns in this process."""
    for name, dtype in DTYPES.items():
        declare_column(NAMES[name], ColumnSpec(dtype=dtype, is_ragged=True, meaning="Payload of the benchmark."))


def batch_of(rows: Rows, *, topic: str, group_size: int) -> Batch:
    """Return samples as whole groups of prompts named after the topic."""
    offsets = offsets_of(rows.lengths)
    keys = [RowKey(f"{topic}/{i // group_size}", i % group_size, 0) for i in range(len(rows.lengths))]
    return Batch(keys, {NAMES[name]: Ragged(values, offsets) for name, values in rows.columns.items()})


def issue(queue: TransferQueue, topic: str, num_groups: int, group_size: int) -> None:
    """Issue the prompts of such a batch."""
    ids = np.zeros(1, dtype=np.int32)
    queue.issue([Prompt(uid=f"{topic}/{i}", input_ids=ids) for i in range(num_groups)], num_sessions=group_size)


class Client:
    """One producer, or the consumer."""

    def __init__(self, number: int, queue: TransferQueue, *, is_verified: bool) -> None:
        """Create the samples to put.

        Args:
            number: Index of the producer, from 0.
            queue: The queue.
            is_verified: The queue itself has read every byte of a lease, for its checksum: no need to `look`.
        """
        declare()
        self._number, self._queue, self._is_verified = number, queue, is_verified
        self._bulk, self._small = producer_rows(number), small_row(number)

    def put_bulk(self, topic: str, starts_at: float) -> float:
        """Put the producer's samples; return the seconds since the common start."""
        batch = batch_of(self._bulk, topic=f"{topic}/{self._number}", group_size=GROUP_SIZE)
        wait_until(starts_at)
        self._queue.put_batch(batch)
        return time.perf_counter() - starts_at

    def get_bulk(self, topic: str) -> tuple[float, float]:  # noqa: ARG002 - as the peers have it
        """Get all samples and read every byte once; return those seconds, and those of the ack, which peers lack."""
        started = time.perf_counter()
        lease = self._queue.lease("train", groups=NUM_SAMPLES // GROUP_SIZE, deadline_s=CALL_TIMEOUT_S)
        self._look(lease)
        got = time.perf_counter()
        self._queue.ack(lease)
        return got - started, time.perf_counter() - got

    def put_small(self, topic: str, starts_at: float, num_calls: int) -> list[float]:
        """Put one sample repeatedly."""
        topics = (f"{topic}/{self._number}/{i}" for i in range(num_calls))
        batches = iter([batch_of(self._small, topic=topic, group_size=1) for topic in topics])
        return times_ms(lambda: self._queue.put_batch(next(batches)), num_calls=num_calls, starts_at=starts_at)

    def get_small(self, topic: str, starts_at: float, num_calls: int) -> list[tuple[float, float]]:  # noqa: ARG002
        """Get and ack one sample repeatedly; return the milliseconds of each call."""
        wait_until(starts_at)
        return [self._get_one() for _ in range(num_calls)]

    def _get_one(self) -> tuple[float, float]:
        started = time.perf_counter()
        lease = self._queue.lease("train", groups=1, deadline_s=CALL_TIMEOUT_S)
        self._look(lease)
        got = time.perf_counter()
        self._queue.ack(lease)
        return (got - started) * 1_000, (time.perf_counter() - got) * 1_000

    def _look(self, lease: Lease) -> None:
        if not self._is_verified:
            for name in NAMES.values():
                look(lease.batch.ragged(name).runs())


Crew = Callable[[Sequence[int], str, Sequence[Any]], list[Any]]
"""Calls a method of several clients at once and returns their answers."""


class OurQueue:
    """The measures of `_protocol.System`."""

    def __init__(self, queue: TransferQueue, crew: Crew, measure: Callable[[], dict[str, int] | None]) -> None:
        """Set the queue, the clients and the measure of memory."""
        self._queue, self._crew, self._measure = queue, crew, measure
        self._topics = (f"t{number}" for number in itertools.count())

    def bulk(self) -> dict[str, float]:
        """One round."""
        topic = next(self._topics)
        for producer in range(NUM_PRODUCERS):
            issue(self._queue, f"{topic}/{producer}", NUM_SAMPLES // NUM_PRODUCERS // GROUP_SIZE, GROUP_SIZE)
        put_s = max(self._together("put_bulk", topic))
        ((get_s, ack_s),) = self._crew([0], "get_bulk", [topic])
        self._queue.forget_finished()
        return {"put_s": put_s, "get_s": get_s, "ack_s": ack_s}

    def small(self, *, num_calls: int) -> dict[str, list[float]]:
        """Run small puts, then small gets."""
        topic, share = next(self._topics), -(-num_calls // NUM_PRODUCERS)
        for client in range(NUM_PRODUCERS):
            for call in range(share):
                issue(self._queue, f"{topic}/{client}/{call}", 1, 1)
        put_ms = self._together("put_small", topic, share)
        got = list(itertools.chain(*self._together("get_small", topic, share)))
        self._queue.forget_finished()
        get_ms, ack_ms = ([times[i] for times in got] for i in range(2))
        return {"put_ms": list(itertools.chain(*put_ms)), "get_ms": get_ms, "ack_ms": ack_ms}

    def lease(self, *, num_rows: int, batch_rows: int, num_calls: int) -> dict[str, Any]:
        """Measure leases while the queue holds a number of rows."""
        topic = next(self._topics)
        for start in range(0, num_rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, num_rows - start)
            issue(self._queue, f"{topic}/{start}", -(-count // GROUP_SIZE), GROUP_SIZE)
            rows = make_rows(np.ones(count, dtype=np.int64), seed=start)
            self._queue.put_batch(batch_of(rows, topic=f"{topic}/{start}", group_size=GROUP_SIZE))
        leases: list[Any] = []
        groups = batch_rows // GROUP_SIZE
        lease_ms = times_ms(
            lambda: leases.append(self._queue.lease("train", groups=groups)), num_calls=num_calls, starts_at=0.0
        )
        for lease in leases:
            self._queue.ack(lease)
        leases.clear()
        while held := int(self._queue.stats().get("groups/settled", 0)):
            self._queue.ack(self._queue.lease("train", groups=min(held, 5_000)))
        self._queue.forget_finished()
        return {"lease_ms": lease_ms}

    def memory(self) -> dict[str, int] | None:
        """Measure the peak memory of one more round."""
        return self._measure()

    def _together(self, method: str, topic: str, *arguments: int) -> list[Any]:
        starts_at = time.perf_counter() + LEAD_S
        return self._crew(range(NUM_PRODUCERS), method, [topic, starts_at, *arguments])
