"""The transfer queue across hosts, on Ray: rows in its object store, requests to a server actor."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl_core import errors
from rl_core.cluster.ray.session import start_ray
from rl_core.data.batch import Batch
from rl_core.data.segment import decode_segment
from rl_core.errors import DeadlineError, JournalError, NotReadyError, RLError, RoleError, SegmentError
from rl_core.queue.client import TransferQueue
from rl_core.queue.interface import QueueOptions, TaskSpec, checked_options
from rl_core.queue.messages import Ack, Leased, Put, Reply, Request, as_retry, decode_reply
from rl_core.queue.rows import Prepared, prepare_segment
from rl_core.queue.shared_memory.scratch import Scratches

GRACE_S = 20.0
START_DEADLINE_S = 120.0
FETCH_DEADLINE_S = 60.0
RETRY_PAUSE_S = 0.1


class RayQueue(TransferQueue):
    """A `TransferQueue` for the processes of a Ray cluster; send it to actors and tasks as an argument.

    Starts Ray on this machine, with a token and on loopback, unless it is already running. The queue ends with the
    process that created it. A server actor stores the state. Storage actors, one per producing node, own the rows, so
    that rows outlive their producers. A dead consumer's leases expire.
    """

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        *,
        options: QueueOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the queue's server.

        Args:
            tasks: All tasks; a group is done once every task has acked it.
            options: Bounds and the journal's directory, on the node of this process. With a journal, Ray restarts a
                dead server, which resumes.
            clock: Returns seconds, for lease times in the server; tests pass their own.

        Raises:
            DataError: A task names an unknown column.
            SettingsError: The tasks or options are invalid.
            JournalError: The journal's directory cannot be used.
        """
        options = checked_options(tasks, options)
        ray = start_ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from rl_core.queue.ray.actors import MAX_WAITING, QueueActor

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        restarts = 0 if options.directory is None else -1
        actor = ray.remote(num_cpus=0, max_concurrency=MAX_WAITING, max_restarts=restarts)(QueueActor)
        self._is_owner = True
        self._join(actor.options(scheduling_strategy=here).remote(list(tasks), options, clock))

    server_pid: int
    """Process id of the server."""
    _is_closed: bool

    @classmethod
    def _of(cls, server: Any) -> "RayQueue":
        self = cls.__new__(cls)
        self._is_owner = False
        self._join(server)
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        """Pickle as a connection to the same queue."""
        return RayQueue._of, (self._server,)

    def close(self) -> None:
        """Leave the queue; it ends when its owner closes it."""
        import ray

        if self._is_closed:
            return
        self._is_closed = True
        if self._is_owner:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._server.close.remote(), timeout=GRACE_S)
            ray.kill(self._server)

    def _join(self, server: Any) -> None:
        import ray

        self._server = server
        self._is_closed = False
        self._client = f"pid {os.getpid()} {uuid.uuid4().hex[:8]}"
        try:
            encoded, folder, is_bounded, self.server_pid = ray.get(server.hello.remote(), timeout=START_DEADLINE_S)
        except ray.exceptions.RayError as error:
            raise _start_error(error) from error
        self._has_journal = folder is not None
        super().__init__(msgspec.json.decode(encoded, type=list[TaskSpec]), RayRows(server, folder))
        self._reserves = is_bounded

    def _send(self, request: Request, *, deadline_s: float) -> Reply:
        import ray

        ends_at = time.monotonic() + deadline_s + GRACE_S
        references: dict[str, Any] = {}
        if isinstance(request, Put | Ack) and isinstance(request.place, _Written):
            references = {request.place.key: request.place.references}
            request = msgspec.structs.replace(request, place=request.place.place)
        while True:
            if self._is_closed:
                raise NotReadyError("the transfer queue is closed.")
            pending = self._server.request.remote(self._client, msgspec.msgpack.encode(request), references)
            try:
                body, named = ray.get(pending, timeout=max(ends_at - time.monotonic(), 0.001))
            except ray.exceptions.GetTimeoutError as error:
                ray.cancel(pending)
                raise DeadlineError(
                    f"{type(request).__name__} waited {deadline_s + GRACE_S:g} s for the queue's server, which is "
                    "running but did not answer."
                ) from error
            except ray.exceptions.RayActorError as error:
                self._refuse_gone(error, ends_at)
                request = as_retry(request)
                continue
            return _with_references(decode_reply(body), named)

    def _refuse_gone(self, error: Exception, ends_at: float) -> None:
        """After the server's death, wait for Ray to restart it; raise an error with the cause if Ray does not."""
        if self._is_closed:
            raise NotReadyError("the transfer queue is closed.") from error
        if not self._has_journal:
            raise RoleError(
                f"the queue's server (pid {self.server_pid}) and its state are gone: the queue has no journal, or its "
                f"owner closed it. Set QueueOptions.directory to survive crashes. Ray says: {error}"
            ) from error
        if time.monotonic() > ends_at:
            raise DeadlineError(f"the queue's server ended and was not restarted: {error}") from error
        time.sleep(RETRY_PAUSE_S)


class RayRows:
    """Rows in Ray's object store, owned by storage actors; small segments are inlined in messages."""

    is_slow = True

    def __init__(self, server: Any, folder: str | None) -> None:
        """Use this server's storages, and this folder for files if there is a journal."""
        self._server = server
        self._folder = folder
        self._storage: Any = None
        self._storage_node = ""
        self._scratches = Scratches()

    prepare = staticmethod(prepare_segment)

    def write(self, prepared: Prepared, place: Any) -> Any:  # noqa: ARG002 - clients choose the place
        """Send a segment to this node's storage."""
        from rl_core.queue.ray.actors import STORED

        key = uuid.uuid4().hex
        spill = None if self._folder is None else str(Path(self._folder) / f"{key}.seg")
        if self._is_near():
            with self._scratches.take(prepared.size_bytes) as scratch:
                prepared.plan.write(np.frombuffer(scratch.memory, dtype=np.uint8))
                references = self._of_storage("store_scratch", tuple(scratch.name), prepared.size_bytes, spill)
        else:
            segment = np.empty(prepared.size_bytes, dtype=np.uint8)
            prepared.plan.write(segment)
            references = self._of_storage("store", segment, spill)
        return _Written(key, [STORED, key, prepared.size_bytes, spill], references)

    def read(self, number: int, place: Any) -> Batch:  # noqa: ARG002
        """Read a segment from the object store, or from its file if its owner has ended."""
        import ray

        if isinstance(place, bytes):
            return decode_segment(place)
        written: _Written = place
        spill = written.place[3]
        try:
            if written.references:
                return decode_segment(ray.get(written.references[0], timeout=FETCH_DEADLINE_S))
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
            if spill is None:
                raise SegmentError(f"its storage has ended: {type(error).__name__}.") from error
        if spill is None:
            raise SegmentError("its storage has ended, and it has no file.")
        references = self._of_storage("load", spill)
        try:
            return decode_segment(ray.get(references[0], timeout=FETCH_DEADLINE_S))
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
            raise SegmentError(f"{spill} cannot be fetched: {type(error).__name__}.") from error

    def _is_near(self) -> bool:
        """Return True if the storage is on this node and can map this process's memory."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        self._find_storage(node)
        return hasattr(os, "memfd_create") and self._storage_node == node

    def _find_storage(self, node: str) -> None:
        import ray

        if self._storage is None:
            found = ray.get(self._server.storage.remote(node), timeout=START_DEADLINE_S)
            self._storage, self._storage_node = found

    def _of_storage(self, method: str, *arguments: Any) -> Any:
        """Call this node's storage, or a new one if it has ended."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        ends_at = time.monotonic() + FETCH_DEADLINE_S
        while True:
            try:
                self._find_storage(node)
                return ray.get(getattr(self._storage, method).remote(*arguments), timeout=FETCH_DEADLINE_S)
            except ray.exceptions.RayActorError as error:
                if time.monotonic() > ends_at:
                    raise RoleError(f"the queue's storage does not answer: {error}") from error
                with contextlib.suppress(ray.exceptions.RayActorError):
                    if self._storage is not None:
                        gone = self._server.storage_is_gone.remote(node, self._storage._actor_id.hex())
                        ray.get(gone, timeout=FETCH_DEADLINE_S)
                self._storage = None
                time.sleep(RETRY_PAUSE_S)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RLError):
                    raise error.cause from error
                raise


class _Written:
    """A segment in the object store: its place in the server's terms, and references to it."""

    def __init__(self, key: str, place: list[Any], references: list[Any]) -> None:
        self.key, self.place, self.references = key, place, references


def _with_references(reply: Reply, named: dict[str, list[Any]]) -> Reply:
    if not isinstance(reply, Leased):
        return reply
    places = {
        number: _Written(place[1], place, named.get(place[1], [])) if isinstance(place, list) else place
        for number, place in reply.places.items()
    }
    return msgspec.structs.replace(reply, places=places)


def _start_error(error: Exception) -> RLError:
    """Return the error that prevented the server's start, unwrapped if it is an RLError."""
    text = str(error)
    for kind in (JournalError, errors.SettingsError):
        if kind.__name__ in text:
            message = text.rpartition(f"{kind.__name__}: ")[2].strip()
            return kind(message.splitlines()[0] if message else text)
    return RoleError(f"the queue's server could not be started: {text}")
