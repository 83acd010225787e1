"""TransferQueue 0.1.11 with its default storage, driven through its public client.

It runs in its own environment, without this repository's packages.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import ray
import torch
import transfer_queue
from _payload import COLUMNS, NUM_PRODUCERS, NUM_SAMPLES, Rows, look, one_token_rows, producer_rows, small_row
from _protocol import serve
from _ray_clients import RayClients, call, ray_cluster
from _timing import wait_until
from tensordict import TensorDict

Result = TypeVar("Result")
TASK = "train"
WAVE_ROWS = 10_000
LEASE_LIMIT_S = 20.0
"""Maximum time to put rows; larger numbers of rows are skipped."""

CPUS_OF_ITS_ACTORS = 3
"""With the default settings, the controller and the two storage units reserve a CPU each."""


def tensor_dict(rows: Rows) -> TensorDict:
    """Return the samples as in TransferQueue's examples: a jagged tensor for each column."""
    offsets = torch.nn.functional.pad(torch.from_numpy(rows.lengths).cumsum(0), (1, 0))
    columns = {
        name: torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), offsets)
        for name, values in rows.columns.items()
    }
    return TensorDict(columns, batch_size=len(rows.lengths))


class Connection:
    """TransferQueue's client, in one event loop, because its sockets belong to a loop."""

    def __init__(self) -> None:
        """Connect to the TransferQueue of this Ray."""
        transfer_queue.init()
        self._client: Any = transfer_queue.get_client()
        self._loop = asyncio.new_event_loop()

    def run(self, act: Awaitable[Result]) -> Result:
        """Wait for one of the methods below."""
        return self._loop.run_until_complete(act)

    def times_ms(self, act: Callable[[], Awaitable[object]], *, num_calls: int, starts_at: float) -> list[float]:
        """Run a closed loop of one of the methods below; return the milliseconds of each call."""

        async def loop() -> list[float]:
            taken = []
            for _ in range(num_calls):
                started = time.perf_counter()
                await act()
                taken.append((time.perf_counter() - started) * 1_000)
            return taken

        wait_until(starts_at)
        return self.run(loop())

    async def put(self, rows: TensorDict, topic: str) -> None:
        """Put samples."""
        await self._client.async_put(rows, partition_id=topic)

    async def metadata(self, num_rows: int, topic: str) -> Any:
        """Return the places of some samples, which then count as consumed."""
        found = await self._client.async_get_meta(
            data_fields=list(COLUMNS), batch_size=num_rows, partition_id=topic, task_name=TASK
        )
        if len(found) != num_rows:
            raise RuntimeError(f"{num_rows} samples were expected; found {len(found)}.")
        return found

    async def get(self, num_rows: int, topic: str) -> None:
        """Get samples and read them."""
        found = await self._client.async_get_data(await self.metadata(num_rows, topic))
        look((found[name].values() if found[name].is_nested else found[name]).numpy() for name in COLUMNS)

    async def clear(self, topic: str) -> None:
        """Drop all that was put under a topic."""
        await self._client.async_clear_partition(topic)


class Client:
    """A producer, or the consumer."""

    def __init__(self, number: int) -> None:
        """Connect, and create the samples to put."""
        self._queue = Connection()
        self._bulk, self._small = tensor_dict(producer_rows(number)), tensor_dict(small_row(number))

    def put_bulk(self, topic: str, starts_at: float) -> float:
        """Put the producer's samples; return the seconds since the common start."""
        wait_until(starts_at)
        self._queue.run(self._queue.put(self._bulk, topic))
        return time.perf_counter() - starts_at

    def get_bulk(self, topic: str) -> float:
        """Get all producers' samples; return the seconds."""
        started = time.perf_counter()
        self._queue.run(self._queue.get(NUM_SAMPLES, topic))
        return time.perf_counter() - started

    def put_small(self, topic: str, starts_at: float, num_calls: int) -> list[float]:
        """Put one sample repeatedly."""
        put = partial(self._queue.put, self._small, topic)
        return self._queue.times_ms(put, num_calls=num_calls, starts_at=starts_at)

    def get_small(self, topic: str, starts_at: float, num_calls: int) -> list[float]:
        """Get one sample repeatedly."""
        get = partial(self._queue.get, 1, topic)
        return self._queue.times_ms(get, num_calls=num_calls, starts_at=starts_at)

    def put_one_token_rows(self, topic: str, starts_at: float, num_rows: int) -> float:
        """Put many samples of one token each; return the seconds since the common start."""
        rows = tensor_dict(one_token_rows(num_rows))
        wait_until(starts_at)
        self._queue.run(self._queue.put(rows, topic))
        return time.perf_counter() - starts_at

    def lease(self, topic: str, batch_rows: int, num_calls: int) -> list[float]:
        """Request the places of some samples repeatedly."""
        ask = partial(self._queue.metadata, batch_rows, topic)
        return self._queue.times_ms(ask, num_calls=num_calls, starts_at=time.perf_counter())

    def clear(self, topic: str) -> None:
        """Drop all that was put under a topic."""
        self._queue.run(self._queue.clear(topic))


class TransferQueue(RayClients):
    """The measures of `_protocol.System`."""

    def lease(self, *, num_rows: int, batch_rows: int, num_calls: int) -> dict[str, Any]:
        """Return the milliseconds of each request for metadata, unless putting the rows takes too long."""
        with self.topic() as topic:
            for held in range(0, num_rows, WAVE_ROWS):
                taken_s = max(self.together("put_one_token_rows", topic, WAVE_ROWS // NUM_PRODUCERS))
                expected_s = taken_s * (num_rows - held) / WAVE_ROWS
                if expected_s > LEASE_LIMIT_S:
                    return {"reason": f"putting {num_rows} rows would take {expected_s:.0f} s"}
            return {"lease_ms": call(self.clients[0].lease.remote(topic, batch_rows, num_calls))}


@contextmanager
def opened() -> Iterator[TransferQueue]:
    """Open a cluster with TransferQueue's default storage and the clients."""
    with ray_cluster(num_cpus=CPUS_OF_ITS_ACTORS + 1):
        actor = ray.remote(num_cpus=0)
        transfer_queue.init()
        try:
            clients: list[Any] = [actor(Client).remote(number) for number in range(NUM_PRODUCERS)]
            yield TransferQueue(clients, clear=lambda topic: call(clients[0].clear.remote(topic)))
        finally:
            transfer_queue.close()


if __name__ == "__main__":
    sys.exit(serve(opened))
