"""Shared parts of the systems on Ray: a cluster for one process, and 8 client actors that act together."""

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from _timing import LEAD_S

LOOPBACK = "127.0.0.1"
CALL_TIMEOUT_S = 120.0


@contextmanager
def ray_cluster(*, num_cpus: int) -> Iterator[None]:
    """A Ray cluster for this process: on loopback, without dashboard and usage reports; its files are removed."""
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path, because sockets need one
    try:
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=1 << 30,
            _node_ip_address=LOOPBACK,
            _temp_dir=folder,
        )
        found = ray.get_runtime_context().gcs_address.rpartition(":")[0]
        if found != LOOPBACK:
            raise RuntimeError(f"Ray must stay on {LOOPBACK}; found {found}. See VARIABLES in _transfer_peers.py.")
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class RayClients:
    """The measures of `_protocol.System`, with the work done by client actors.

    An actor has put_bulk(topic, starts_at) and get_bulk(topic), put_small and get_small(topic, starts_at, num_calls).
    The first two return seconds, the others a list of milliseconds per call.
    """

    def __init__(self, clients: Sequence[Any], *, clear: Callable[[str], None]) -> None:
        """Set the clients.

        Args:
            clients: Handles of the actors; the first is also the consumer.
            clear: Drops the samples of a topic.
        """
        self.clients = clients
        self._clear = clear
        self._topics = (f"topic-{number}" for number in itertools.count())

    def bulk(self) -> dict[str, float]:
        """One round."""
        with self.topic() as topic:
            put_s = max(self.together("put_bulk", topic))
            get_s = call(self.clients[0].get_bulk.remote(topic))
        return {"put_s": put_s, "get_s": get_s}

    def small(self, *, num_calls: int) -> dict[str, list[float]]:
        """Run small puts, then small gets."""
        share = -(-num_calls // len(self.clients))
        with self.topic() as topic:
            put_ms = self.together("put_small", topic, share)
            get_ms = self.together("get_small", topic, share)
        return {"put_ms": list(itertools.chain(*put_ms)), "get_ms": list(itertools.chain(*get_ms))}

    def memory(self) -> None:
        """Not measured."""

    def together(self, method: str, topic: str, *arguments: int) -> list[Any]:
        """Call a method of all clients, with a common start."""
        starts_at = time.perf_counter() + LEAD_S
        return list(call([getattr(client, method).remote(topic, starts_at, *arguments) for client in self.clients]))

    @contextmanager
    def topic(self) -> Iterator[str]:
        """Yield a topic for a round's samples, which are dropped at the end."""
        name = next(self._topics)
        yield name
        self._clear(name)


def call(references: Any) -> Any:
    """Return the actors' answers, within a deadline."""
    return ray.get(references, timeout=CALL_TIMEOUT_S)
