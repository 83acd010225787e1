"""Plain Ray as a transfer queue: an object of flat arrays for each put, and an actor that stores the references."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from _payload import NUM_PRODUCERS, Rows, look, producer_rows, small_row
from _protocol import serve
from _ray_clients import RayClients, call, ray_cluster
from _timing import times_ms, wait_until

References = list[Any]


class Directory:
    """Stores the lengths and the reference of each put."""

    def __init__(self) -> None:
        """Start without puts."""
        self._waiting: list[tuple[Any, References]] = []

    def add(self, lengths: Any, references: References) -> None:
        """Record a put; the reference is in a list, so that Ray does not resolve it."""
        self._waiting.append((lengths, references))

    def take(self, num_puts: int) -> list[tuple[Any, References]]:
        """Remove and return the oldest puts."""
        taken, self._waiting = self._waiting[:num_puts], self._waiting[num_puts:]
        return taken


class Client:
    """A producer, or the consumer."""

    def __init__(self, number: int, directory: Any) -> None:
        """Create the samples to put."""
        self._directory = directory
        self._bulk, self._small = producer_rows(number), small_row(number)

    def put_bulk(self, _topic: str, starts_at: float) -> float:
        """Put the producer's samples; return the seconds since the common start."""
        wait_until(starts_at)
        self._put(self._bulk)
        return time.perf_counter() - starts_at

    def get_bulk(self, _topic: str) -> float:
        """Get all producers' samples; return the seconds."""
        started = time.perf_counter()
        self._get(NUM_PRODUCERS)
        return time.perf_counter() - started

    def put_small(self, _topic: str, starts_at: float, num_calls: int) -> list[float]:
        """Put one sample repeatedly."""
        return times_ms(lambda: self._put(self._small), num_calls=num_calls, starts_at=starts_at)

    def get_small(self, _topic: str, starts_at: float, num_calls: int) -> list[float]:
        """Get one sample repeatedly."""
        return times_ms(lambda: self._get(1), num_calls=num_calls, starts_at=starts_at)

    def _put(self, rows: Rows) -> None:
        call(self._directory.add.remote(rows.lengths, [ray.put(dict(rows.columns))]))

    def _get(self, num_puts: int) -> None:
        taken = call(self._directory.take.remote(num_puts))
        found = call([reference for _, references in taken for reference in references])
        if len(found) != num_puts:
            raise RuntimeError(f"{num_puts} puts were expected; found {len(found)}.")
        for columns in found:
            look(columns.values())


class PlainRay(RayClients):
    """The measures of `_protocol.System`."""

    def lease(self, *, num_rows: int, batch_rows: int, num_calls: int) -> dict[str, Any]:
        """Not measured."""
        return {"reason": f"plain Ray has no leases ({num_rows} rows, {num_calls} x {batch_rows})"}


@contextmanager
def opened() -> Iterator[PlainRay]:
    """Open a cluster with the directory and the clients."""
    with ray_cluster(num_cpus=2):
        actor = ray.remote(num_cpus=0)
        directory = actor(Directory).remote()
        clients = [actor(Client).remote(number, directory) for number in range(NUM_PRODUCERS)]
        yield PlainRay(clients, clear=lambda _: None)


if __name__ == "__main__":
    sys.exit(serve(opened))
