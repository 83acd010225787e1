"""This project's transfer queue, with any of its backends: `our_queue.py --backend memory|shm|ray`."""

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from _payload import COLUMNS, NUM_PRODUCERS, NUM_SAMPLES, Rows, look, make_rows, payload_bytes, producer_rows, small_row
from _protocol import System, serve
from _timing import LEAD_S, times_ms, wait_until

from rl_core import Batch, InProcessQueue, Prompt, Ragged, RowKey, TaskSpec, TransferQueue
from rl_core.columns import ColumnSpec, declare_column
from rl_core.queue.shared_memory import SharedMemoryQueue
from rl_core.ragged import offsets_of

CALL_TIMEOUT_S = 120.0
GROUP_SIZE = 8
CHUNK_ROWS = 2_000
"""Rows of one put, where only their number matters."""
NAMES = {name: f"bench_{name}" for name in COLUMNS}
DTYPES = {"input_ids": "int64", "position_ids": "int64", "logprobs": "float32", "mask": "int8"}
TASK = TaskSpec(name="train", needs=frozenset())


def declare() -> None:
    """Make the payload's columns known in this process."""
    for name, dtype in DTYPES.items():
        declare_column(NAMES[name], ColumnSpec(dtype=dtype, is_ragged=True, meaning="Payload of the benchmark."))


def batch_of(rows: Rows, *, topic: str, group_size: int) -> Batch:
    """Samples as whole groups of prompts named after the topic."""
    offsets = offsets_of(rows.lengths)
    keys = [RowKey(f"{topic}/{i // group_size}", i % group_size, 0) for i in range(len(rows.lengths))]
    return Batch(keys, {NAMES[name]: Ragged(values, offsets) for name, values in rows.columns.items()})


def issue(queue: TransferQueue, topic: str, num_groups: int, group_size: int) -> None:
    """Enter the prompts of such a batch."""
    ids = np.zeros(1, dtype=np.int32)
    queue.issue([Prompt(uid=f"{topic}/{i}", input_ids=ids) for i in range(num_groups)], num_sessions=group_size)


class Client:
    """One producer, and what consumes."""

    def __init__(self, number: int, queue: TransferQueue) -> None:
        """Make what will be put."""
        declare()
        self._number, self._queue = number, queue
        self._bulk, self._small = producer_rows(number), small_row(number)

    def put_bulk(self, topic: str, starts_at: float) -> float:
        """Put the producer's samples; seconds since the common start."""
        batch = batch_of(self._bulk, topic=f"{topic}/{self._number}", group_size=GROUP_SIZE)
        wait_until(starts_at)
        self._queue.put_batch(batch)
        return time.perf_counter() - starts_at

    def get_bulk(self, topic: str) -> float:  # noqa: ARG002 - as the peers have it
        """Get all producers' samples, read them, and ack; seconds."""
        started = time.perf_counter()
        lease = self._queue.lease("train", rows=NUM_SAMPLES, deadline_s=CALL_TIMEOUT_S)
        for name in NAMES.values():
            look(lease.batch.ragged(name).runs())
        self._queue.ack(lease)
        return time.perf_counter() - started

    def put_small(self, topic: str, starts_at: float, num_calls: int) -> list[float]:
        """Put one sample again and again."""
        topics = (f"{topic}/{self._number}/{i}" for i in range(num_calls))
        batches = iter([batch_of(self._small, topic=topic, group_size=1) for topic in topics])
        return times_ms(lambda: self._queue.put_batch(next(batches)), num_calls=num_calls, starts_at=starts_at)

    def get_small(self, topic: str, starts_at: float, num_calls: int) -> list[float]:  # noqa: ARG002
        """Get one sample, and ack it, again and again."""
        return times_ms(self._get_one, num_calls=num_calls, starts_at=starts_at)

    def _get_one(self) -> None:
        lease = self._queue.lease("train", groups=1, deadline_s=CALL_TIMEOUT_S)
        for name in NAMES.values():
            look(lease.batch.ragged(name).runs())
        self._queue.ack(lease)


Crew = Callable[[Sequence[int], str, Sequence[Any]], list[Any]]
"""Calls a method of the clients with these numbers at once, and gives their answers."""


class OurQueue:
    """The measures of `_protocol.System`."""

    def __init__(self, queue: TransferQueue, crew: Crew, measure: Callable[[], dict[str, int] | None]) -> None:
        """Use this queue, these clients, and this measure of memory."""
        self._queue, self._crew, self._measure = queue, crew, measure
        self._topics = (f"t{number}" for number in itertools.count())

    def bulk(self) -> dict[str, float]:
        """One round."""
        topic = next(self._topics)
        for producer in range(NUM_PRODUCERS):
            issue(self._queue, f"{topic}/{producer}", NUM_SAMPLES // NUM_PRODUCERS // GROUP_SIZE, GROUP_SIZE)
        put_s = max(self._together("put_bulk", topic))
        (get_s,) = self._crew([0], "get_bulk", [topic])
        self._queue.forget_finished()
        return {"put_s": put_s, "get_s": get_s}

    def small(self, *, num_calls: int) -> dict[str, list[float]]:
        """Small puts, then small gets."""
        topic, share = next(self._topics), -(-num_calls // NUM_PRODUCERS)
        for client in range(NUM_PRODUCERS):
            for call in range(share):
                issue(self._queue, f"{topic}/{client}/{call}", 1, 1)
        put_ms = self._together("put_small", topic, share)
        get_ms = self._together("get_small", topic, share)
        self._queue.forget_finished()
        return {"put_ms": list(itertools.chain(*put_ms)), "get_ms": list(itertools.chain(*get_ms))}

    def lease(self, *, num_rows: int, batch_rows: int, num_calls: int) -> dict[str, Any]:
        """Leases with so many rows held."""
        topic = next(self._topics)
        for start in range(0, num_rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, num_rows - start)
            issue(self._queue, f"{topic}/{start}", -(-count // GROUP_SIZE), GROUP_SIZE)
            rows = make_rows(np.ones(count, dtype=np.int64), seed=start)
            self._queue.put_batch(batch_of(rows, topic=f"{topic}/{start}", group_size=GROUP_SIZE))
        leases: list[Any] = []
        lease_ms = times_ms(
            lambda: leases.append(self._queue.lease("train", rows=batch_rows)), num_calls=num_calls, starts_at=0.0
        )
        for lease in leases:
            self._queue.ack(lease)
        leases.clear()
        while held := int(self._queue.stats().get("groups/settled", 0)):
            self._queue.ack(self._queue.lease("train", groups=min(held, 5_000)))
        self._queue.forget_finished()
        return {"lease_ms": lease_ms}

    def memory(self) -> dict[str, int] | None:
        """What one more round takes at its peak."""
        return self._measure()

    def _together(self, method: str, topic: str, *arguments: int) -> list[Any]:
        starts_at = time.perf_counter() + LEAD_S
        return self._crew(range(NUM_PRODUCERS), method, [topic, starts_at, *arguments])


@contextmanager
def memory() -> Iterator[OurQueue]:
    """The queue in the process, with threads."""
    declare()
    queue = InProcessQueue([TASK])
    clients = [Client(number, queue) for number in range(NUM_PRODUCERS)]
    with ThreadPoolExecutor(NUM_PRODUCERS) as threads:

        def crew(numbers: Sequence[int], method: str, arguments: Sequence[Any]) -> list[Any]:
            calls = [threads.submit(getattr(clients[number], method), *arguments) for number in numbers]
            return [call.result(CALL_TIMEOUT_S) for call in calls]

        system = OurQueue(queue, crew, lambda: None)
        yield system
    queue.close()


class Processes:
    """A process for each client, told by pipes what to do."""

    def __init__(self, queue: SharedMemoryQueue) -> None:
        """Start them."""
        context = multiprocessing.get_context("spawn")
        self._queue = queue
        self._pipes, self._processes = [], []
        for number in range(NUM_PRODUCERS):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=work, args=(theirs, number, queue), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def call(self, numbers: Sequence[int], method: str, arguments: Sequence[Any]) -> list[Any]:
        """A `Crew`."""
        for number in numbers:
            self._pipes[number].send((method, arguments))
        answers = []
        for number in numbers:
            if not self._pipes[number].poll(CALL_TIMEOUT_S):
                raise TimeoutError(f"client {number} did not answer {method} for {CALL_TIMEOUT_S:g} s.")
            answers.append(self._pipes[number].recv())
        return answers

    def measure(self) -> dict[str, int]:
        """What a round takes at its peak: slots, and by how much the processes have grown since before any."""
        slots = 0

        def call_and_look(numbers: Sequence[int], method: str, arguments: Sequence[Any]) -> list[Any]:
            nonlocal slots
            answers = self.call(numbers, method, arguments)
            folder = Path(self._queue.address) / "segments"
            slots = max(slots, sum(slot.stat().st_blocks * 512 for slot in folder.iterdir()))
            return answers

        before = self.private_bytes()
        OurQueue(self._queue, call_and_look, lambda: None).bulk()
        return {"peak_bytes": slots + max(self.private_bytes() - before, 0), "payload_bytes": payload_bytes()}

    def private_bytes(self) -> int:
        """Memory of the clients and the keeper that is their own, shared memory and files apart."""
        pids = [*(process.pid for process in self._processes), self._queue.keeper_pid]
        return sum(private_bytes(pid) for pid in pids if pid is not None)

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(CALL_TIMEOUT_S)


@contextmanager
def shm() -> Iterator[OurQueue]:
    """The queue in shared memory, with a process for each client."""
    declare()
    queue = SharedMemoryQueue([TASK])
    processes = Processes(queue)
    yield OurQueue(queue, processes.call, processes.measure)
    processes.close()
    queue.close()


def work(pipe: Any, number: int, queue: TransferQueue) -> None:
    """A client's process."""
    client = Client(number, queue)
    while (request := pipe.recv()) is not None:
        method, arguments = request
        pipe.send(getattr(client, method)(*arguments))


def private_bytes(pid: int) -> int:
    """Memory of a process that is its own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["RssAnon"].split()[0]) * 1024


@contextmanager
def on_ray() -> Iterator[System]:
    """The queue on Ray, with an actor for each client."""
    from _our_ray import opened

    with opened() as system:
        yield system


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["memory", "shm", "ray"], required=True)
    backends: dict[str, Any] = {"memory": memory, "shm": shm, "ray": on_ray}
    sys.exit(serve(backends[parser.parse_args().backend]))
