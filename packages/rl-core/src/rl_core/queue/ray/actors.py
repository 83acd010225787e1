"""The actors of a queue on Ray: a server with the state, and storages that own the rows."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_core.data.segment import segment_size
from rl_core.errors import JournalError, SegmentError
from rl_core.queue.interface import QueueOptions, TaskSpec
from rl_core.queue.journal.records import SEGMENTS
from rl_core.queue.messages import Ack, Leased, Put, Refused, Reply, decode_request
from rl_core.queue.service import QueueService
from rl_core.queue.shared_memory.scratch import ScratchName, mapped_scratch

STORED = "stored"
RESERVATION_S = 600.0
MAX_WAITING = 100_000
"""Maximum number of concurrent calls in the server; above it, Ray would delay calls that wake others."""

Reference = ray.ObjectRef[Any]
ServerInfo = tuple[bytes, str | None, bool, int]
Answered = tuple[bytes, dict[str, list[Reference]]]


class Storage:
    """Owns rows: each object that it puts exists as long as the storage and a reference to it exist."""

    def store_scratch(self, name: ScratchName, size_bytes: int, spill: str | None) -> list[Reference]:
        """Store a segment that a process of this host wrote into a scratch.

        Raises:
            SegmentError: The segment cannot be read there.
            JournalError: The file cannot be written.
        """
        try:
            segment = mapped_scratch(ScratchName(*name))[:size_bytes]
        except OSError as error:
            raise SegmentError(f"the memory of process {name[0]} cannot be mapped: {error.strerror}.") from error
        if segment_size(segment) != size_bytes:
            raise SegmentError(f"the memory of process {name[0]} does not contain a segment of {size_bytes} bytes.")
        return self.store(segment, spill)

    def store(self, segment: NDArray[np.uint8], spill: str | None) -> list[Reference]:
        """Store a segment; also write it to a file if the queue has a journal.

        Raises:
            JournalError: The file cannot be written.
        """
        if spill is not None:
            write_aside(Path(spill), segment)
        return [ray.put(segment)]

    def load(self, spill: str) -> list[Reference]:
        """Load a segment from its file.

        Raises:
            SegmentError: The file cannot be read.
        """
        try:
            return [ray.put(np.fromfile(spill, dtype=np.uint8))]
        except OSError as error:
            raise SegmentError(f"{spill} cannot be read: {error.strerror}.") from error

    def node(self) -> str:
        """Return the node that this storage runs on."""
        return str(ray.get_runtime_context().get_node_id())


class QueueActor:
    """One queue's state; its methods wait without blocking other calls."""

    def __init__(self, tasks: Sequence[TaskSpec], options: QueueOptions, clock: Callable[[], float]) -> None:
        """Open the queue.

        Raises:
            JournalError: The journal cannot be opened.
        """
        self._tasks = list(tasks)
        self._references: dict[str, list[Reference]] = {}
        self._folder = None if options.directory is None else Path(options.directory) / SEGMENTS
        self._storages: dict[str, Any] = {}
        self._service = QueueService(tasks, options, clock=clock, make_store=lambda: self, reservation_s=RESERVATION_S)
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    # -- calls by clients

    async def hello(self) -> ServerInfo:
        """Return the tasks, the journal's segment folder or None, whether capacity is bounded, and the process id."""
        folder = None if self._folder is None else str(self._folder)
        options = self._service.core.options
        is_bounded = options.capacity_rows is not None or options.capacity_bytes is not None
        return msgspec.json.encode(msgspec.to_builtins(self._tasks)), folder, is_bounded, os.getpid()

    async def request(self, client: str, body: bytes, references: dict[str, list[Reference]]) -> Answered:
        """Answer a request; references of the named segments accompany request and answer."""
        try:
            message = decode_request(body)
        except msgspec.MsgspecError as error:
            return encode(Refused("DataError", f"a request cannot be decoded: {error}.")), {}
        self._references |= references
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._service.submit(message, client, lambda reply: _answer(answered, reply))
        self._run()
        reply = await answered
        if isinstance(reply, Refused) and isinstance(message, Put | Ack):
            for key in references:
                self._references.pop(key, None)
        return encode(reply), self._named_in(reply)

    async def storage(self, node: str) -> tuple[Any, str]:
        """Return a node's storage, and the node; with a journal always the server's node, which has the files."""
        if self._folder is not None:
            node = str(ray.get_runtime_context().get_node_id())
        if node not in self._storages:
            where = NodeAffinitySchedulingStrategy(node, soft=False)  # a soft affinity is not always respected
            actor: Any = ray.remote(Storage)
            self._storages[node] = actor.options(num_cpus=0, max_concurrency=2, scheduling_strategy=where).remote()
        return self._storages[node], node

    async def storage_is_gone(self, node: str, actor_id: str) -> None:
        """Forget a storage that a client could not reach; the next request creates a new one."""
        if self._folder is not None:
            node = str(ray.get_runtime_context().get_node_id())
        known = self._storages.get(node)
        if known is not None and known._actor_id.hex() == actor_id:
            del self._storages[node]

    async def close(self) -> None:
        """Refuse waiting requests, and release the rows."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._service.close()
        self._references.clear()
        for actor in self._storages.values():
            ray.kill(actor)
        self._storages.clear()

    # -- the store of the service

    def allocate(self, size_bytes: int, client: str) -> Any:
        """Return no place: clients provide their rows."""

    def free(self, place: Any) -> None:
        """Free a segment and its file."""
        if isinstance(place, list):
            _, key, _, spill = place
            self._references.pop(key, None)
            if spill is not None and self._folder is not None:
                (self._folder / Path(spill).name).unlink(missing_ok=True)

    def check(self, place: Any) -> None:
        """See `SegmentStore.check`."""
        if isinstance(place, list) and self._folder is not None:
            path = self._folder / Path(place[3] or "").name
            try:
                memory = np.memmap(path, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise SegmentError(f"{path} cannot be read: {error}.") from error
            if segment_size(memory) > len(memory):
                raise SegmentError(f"{path} is truncated.")

    def remove_others(self, places: list[Any]) -> int:
        """See `SegmentStore.remove_others`."""
        if self._folder is None:
            return 0
        kept = {Path(place[3]).name for place in places if isinstance(place, list) and place[3]}
        others = [path for path in self._folder.glob("*.seg*") if path.name not in kept]
        for path in others:
            path.unlink(missing_ok=True)
        return len(others)

    # -- inside

    def _run(self) -> None:
        """Run the service, and schedule its next run."""
        if self._is_closed:  # no work is left, and the journal is closed
            return
        self._service.run()
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(self._service.next_wake_s(), 0.0), self._run)

    def _named_in(self, reply: Reply) -> dict[str, list[Reference]]:
        if not isinstance(reply, Leased):
            return {}
        keys = [place[1] for place in reply.places.values() if isinstance(place, list)]
        return {key: self._references[key] for key in keys if key in self._references}


def encode(reply: Reply) -> bytes:
    """Encode an answer as bytes."""
    return msgspec.msgpack.encode(reply)


def write_aside(path: Path, segment: NDArray[np.uint8]) -> None:
    """Write a file atomically: under a temporary name, then rename it.

    Raises:
        JournalError: The disk is full or cannot be written.
    """
    aside = path.with_suffix(f".seg-{time.monotonic_ns()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(segment.data)
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise JournalError(f"{path} cannot be written: {error.strerror}.") from error


def _answer(answered: "asyncio.Future[Reply]", reply: Reply) -> None:
    if not answered.done():  # otherwise its caller was cancelled
        answered.set_result(reply)
