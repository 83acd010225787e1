"""The queue's client, shared by all backends."""

import contextlib
import itertools
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from annotated_types import Ge

from rl_core import errors
from rl_core.annotation_rules import expect, several
from rl_core.data.batch import Batch, Column
from rl_core.data.outside_text import encodable
from rl_core.data.records import Prompt, Trajectory
from rl_core.errors import DataError, SegmentError, UndeclaredColumnError
from rl_core.queue.interface import (
    DEFAULT_DEADLINE_S,
    DEFAULT_LEASE_S,
    AnyLease,
    Claim,
    Int63,
    Lease,
    LedgerEntry,
    TaskSpec,
    Unsettled,
)
from rl_core.queue.journal.database import Recovery
from rl_core.queue.messages import (
    GENERATE,
    Ack,
    Drop,
    Extend,
    Fail,
    Finish,
    Issue,
    Leased,
    LeaseRequest,
    Lost,
    Put,
    Refused,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    SetPolicyVersion,
    StateQuery,
    decode_prompt,
    encode_prompt,
)
from rl_core.queue.rows import (
    Payload,
    batch_of_session,
    check_finite,
    check_given,
    check_trajectories,
    describe_parts,
    in_group_order,
    join,
    sessions_of,
)
from rl_core.record_fields import PositiveFloat, converts_arguments

MAX_READERS = 8
NO_REASON = "no reason"
Wait = Annotated[float, Ge(0)]


class TransferQueue(ABC):
    """Moves rows from producers to tasks without loss or concurrent double delivery.

    Every wait has a deadline in seconds; its DeadlineError names the missing condition. Thread-safe.

    The server holds the state; each backend defines how requests reach it and where rows are stored.
    """

    def __init__(self, tasks: Sequence[TaskSpec], payload: Payload) -> None:
        """Store the tasks and the backend's storage for rows."""
        self._tasks: Mapping[str, TaskSpec] = {task.name: task for task in tasks}
        self._payload = payload
        self._reserves = True
        self._put_ids = (os.getpid(), uuid.uuid4().hex, itertools.count())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tasks: {', '.join(self._tasks)})"

    @abstractmethod
    def close(self) -> None:
        """Wake every waiter with NotReadyError and free the rows; a journal's directory is kept."""

    @abstractmethod
    def _send(self, request: Request, *, deadline_s: float) -> Reply:
        """Send a request to the queue's server and return its answer; waits slightly longer than the given time."""

    @converts_arguments
    def issue(self, prompts: Iterable[Prompt], *, num_sessions: Int63) -> None:
        """Add prompts, each to be settled by `num_sessions` sessions.

        Raises:
            DataError: A prompt uid was issued before, or an item is not a Prompt.
        """
        records = several(prompts, Prompt, "prompts")
        self._call(Issue([(prompt.uid, self._pack(prompt)) for prompt in records], num_sessions))

    @converts_arguments
    def claim(
        self,
        *,
        prompts: Int63,
        deadline_s: Wait = DEFAULT_DEADLINE_S,
        claim_s: PositiveFloat = DEFAULT_LEASE_S,
    ) -> Claim:
        """Claim up to a maximum number of prompts to generate for, in issue order; waits for the first.

        A dead producer's claim expires (at once, if the backend detects the death), and its missing sessions are handed
        out again. `put` works without a claim.

        Raises:
            DeadlineError: No prompt became available.
        """
        request = LeaseRequest(GENERATE, prompts, claim_s, deadline_s, True)
        with self._leasing(request) as reply:
            return Claim(
                lease_id=reply.lease_id,
                prompts=tuple(self._unpack(group.prompt) for group in reply.groups),
                sessions=tuple(tuple(group.sessions) for group in reply.groups),
                expires_at=reply.expires_at,
            )

    @converts_arguments
    def put(
        self,
        prompt_uid: str,
        session_index: Int63,
        trajectories: Iterable[Trajectory],
        *,
        deadline_s: Wait = DEFAULT_DEADLINE_S,
    ) -> None:
        """Settle one session with its trajectories atomically; waits while the queue is full.

        Raises:
            DataError: The prompt or session is unknown, or a logprob is NaN.
            AlreadySettledError: The session was already put or failed.
            DeadlineError: The queue stayed full.
        """
        rows = several(trajectories, Trajectory, "trajectories")
        check_trajectories(prompt_uid, session_index, rows)
        if rows:
            self.put_batch(batch_of_session(rows), deadline_s=deadline_s)
        else:
            self._put_all(Batch((), {}), [(prompt_uid, [session_index])], deadline_s=deadline_s)

    @converts_arguments
    def put_batch(self, batch: Batch, *, deadline_s: Wait = DEFAULT_DEADLINE_S) -> None:
        """Settle every session in a batch atomically, as one segment.

        Args:
            batch: Rows with any known columns; it must contain all rows of each session.
            deadline_s: Maximum wait for capacity.

        Raises the same errors as `put`.
        """
        check_finite(batch)
        batch = in_group_order(batch)
        if len(batch):
            self._put_all(batch, sessions_of(batch), deadline_s=deadline_s)

    def _put_all(self, batch: Batch, sessions: list[tuple[str, list[int]]], *, deadline_s: float) -> None:
        put = Put(sessions, describe_parts(batch), sorted(batch.names), None, self._new_put_id(), 0, deadline_s)
        ends_at = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(_ReservationLostError):
                self._put(batch, put, deadline_s=max(ends_at - time.monotonic(), 0.0))
                return

    @converts_arguments
    def fail(self, prompt_uid: str, session_index: Int63, *, reason: str) -> None:
        """Settle one session without rows; a prompt is dropped when all of its sessions fail."""
        self._call(Fail(prompt_uid, session_index, encodable(reason) or NO_REASON))

    @converts_arguments
    def drop(self, prompt_uid: str, *, reason: str, reissue: bool = False) -> None:
        """Remove a prompt and its rows, or issue it again; running leases on it become outdated."""
        self._call(Drop(prompt_uid, encodable(reason) or NO_REASON, reissue))

    @converts_arguments
    def lease(
        self,
        task: str,
        *,
        groups: Int63 | None = None,
        prompts: Sequence[str] | None = None,
        deadline_s: Wait = DEFAULT_DEADLINE_S,
        lease_s: PositiveFloat = DEFAULT_LEASE_S,
        allow_fewer: bool = False,
    ) -> Lease:
        """Lease groups that are ready for a task, by number or by prompt.

        Args:
            task: Name of a declared task.
            groups: Number of groups to wait for.
            prompts: Uids of the groups to lease, in this order regardless of the task's order; waits until all are
                ready and no other consumer has leased them.
            deadline_s: Maximum wait.
            lease_s: Duration of the lease in seconds.
            allow_fewer: Lease the ready groups once no more can become ready.

        Raises:
            DeadlineError: Too few groups became ready.
            NothingToLeaseError: No group is ready, and no issued prompt can become ready.
            DataError: A named prompt was never issued, is done or dropped, was acked by this task, or is or becomes too
                stale. Nothing is leased.
        """
        if (groups is None) == (prompts is None) or task == GENERATE:
            raise DataError(
                f"a lease needs either groups or prompts, and a declared task; found {groups=}, {prompts=} for task "
                f"{task!r}."
            )
        named = list(prompts or ())
        number = len(named) if groups is None else groups
        if named and allow_fewer:
            raise DataError(
                "a lease of named prompts returns exactly these; leave out allow_fewer, or name fewer prompts."
            )
        ends_at = time.monotonic() + deadline_s
        while True:
            remaining_s = max(ends_at - time.monotonic(), 0.0)
            request = LeaseRequest(task, number, lease_s, remaining_s, allow_fewer, named)
            with self._leasing(request) as reply:
                unpacked = tuple(self._unpack(group.prompt) for group in reply.groups)
                batch = self._fetch(reply)
            if batch is not None:
                return Lease(
                    lease_id=reply.lease_id, task=task, prompts=unpacked, batch=batch, expires_at=reply.expires_at
                )

    @converts_arguments
    def extend(self, lease: AnyLease, *, lease_s: PositiveFloat) -> AnyLease:
        """Extend a lease to `lease_s` seconds from now."""
        task = lease.task if isinstance(lease, Lease) else GENERATE
        return replace(lease, expires_at=self._call(Extend(lease.lease_id, task, lease_s)).value)

    def ack(self, lease: Lease, given: Mapping[str, Column] | None = None) -> None:
        """Finish a lease and add columns aligned with `lease.batch`, of any dtype that converts without loss.

        Raises:
            OutdatedLeaseError: The lease expired, was released or was acked.
            DataError: A column is missing or not declared by the task, or a logprob is NaN.
        """
        expect(lease, "lease", Lease)
        task = self._tasks.get(lease.task)
        if task is None:
            raise DataError(f"unknown task {lease.task!r}; declared tasks: {sorted(self._tasks)}.")
        given = {} if given is None else given
        expect(given, "given", Mapping)
        if given.keys() != task.gives:
            raise DataError(
                f"task {task.name!r} must add exactly the columns {sorted(task.gives)}; found {sorted(given)}."
            )
        if not given:
            self._call(Ack(lease.lease_id, lease.task, [], 0, None))
            return
        late = check_given(lease.batch, given)
        while True:
            with contextlib.suppress(_ReservationLostError):
                self._ack(lease, late)
                return

    @converts_arguments
    def finish(self, task: str, prompt_uids: Sequence[str]) -> None:
        """Ack released groups by uid, atomically.

        Use it for work that becomes durable only after its lease is released.

        Raises:
            DataError: The task adds columns, or a prompt was acked by it before, is done or dropped, is leased by a
                consumer of the task, or lacks sessions or columns. Nothing is acked.
        """
        number = -1 - (uuid.uuid4().int >> 66)  # 62 bits, and negative, unlike the numbers of leases
        self._call(Finish(task, list(prompt_uids), number))

    @converts_arguments
    def release(self, lease: Lease | Claim) -> None:
        """Return the groups unfinished; does nothing if the lease is outdated."""
        with contextlib.suppress(errors.NotReadyError):  # closed: no lease exists
            self._call(Release(lease.lease_id))

    @converts_arguments
    def set_policy_version(self, version: Int63) -> None:
        """Set the published policy version, from which staleness is measured; a lower version is ignored."""
        self._call(SetPolicyVersion(version))

    def unsettled(self) -> list[Unsettled]:
        """Return the prompts that are not yet fully settled, in issue order."""
        return [
            Unsettled(
                prompt=self._unpack(prompt),
                sessions=tuple(sessions),
                age_s=age_s,
                attempt=attempt,
                is_claimed=claimed,
            )
            for prompt, sessions, age_s, attempt, claimed in self._ask("unsettled")
        ]

    def ledger(self) -> list[LedgerEntry]:
        """Return the state of every prompt, in issue order."""
        return msgspec.convert(self._ask("ledger"), list[LedgerEntry])

    def forget_finished(self) -> int:
        """Remove done and dropped prompts from the ledger, and return how many were removed."""
        return int(self._ask("forget_finished"))

    def stats(self) -> dict[str, float]:
        """Return rows, bytes and groups by state, leases, waits, and drops by reason."""
        return dict(self._ask("stats"))

    def recovery(self) -> Recovery | None:
        """Return the findings of recovery when the journal was opened; None without a journal."""
        found = self._ask("recovery")
        return None if found is None else msgspec.convert(found, Recovery)

    # -- inside

    def _new_put_id(self) -> str:
        """Return a put id that is unique among all clients."""
        if self._put_ids[0] != os.getpid():
            self._put_ids = (os.getpid(), uuid.uuid4().hex, itertools.count())  # a fork would continue the same count
        return f"{self._put_ids[1]}-{next(self._put_ids[2])}"

    def _pack(self, prompt: Prompt) -> Any:
        return encode_prompt(prompt)

    def _unpack(self, prompt: Any) -> Prompt:
        return prompt if isinstance(prompt, Prompt) else decode_prompt(prompt)

    def _ask(self, what: Literal["stats", "ledger", "unsettled", "recovery", "forget_finished"]) -> Any:
        return self._call(StateQuery(what)).value

    @contextlib.contextmanager
    def _leasing(self, request: LeaseRequest) -> Iterator[Leased]:
        """Lease groups or prompts for a `with` block, which releases them if it raises: no other client knows them."""
        reply: Leased = self._call(request, deadline_s=request.deadline_s)
        try:
            yield reply
        except BaseException:
            with contextlib.suppress(errors.RLError):
                self._call(Release(reply.lease_id))
            raise

    def _put(self, batch: Batch, put: Put, *, deadline_s: float) -> None:
        reserve = Reserve(put.sessions, len(batch), batch.size_bytes, 0, put.put_id, deadline_s)
        place, reservation = self._placed(batch, reserve)
        request = msgspec.structs.replace(put, place=place, reservation=reservation, deadline_s=deadline_s)
        self._call(request, deadline_s=deadline_s)

    def _ack(self, lease: Lease, late: Batch) -> None:
        place, reservation = self._placed(late, Reserve([], 0, late.size_bytes, 0, "", DEFAULT_DEADLINE_S))
        self._call(Ack(lease.lease_id, lease.task, sorted(late.names), late.size_bytes, place, reservation=reservation))

    def _placed(self, batch: Batch, reserve: Reserve) -> tuple[Any, int]:
        """Return a batch's place, after writing it unless it is inlined, and its reservation (0 without one)."""
        prepared = self._payload.prepare(batch)
        if prepared.place is not None:
            return prepared.place, 0
        if not self._reserves:
            return self._payload.write(prepared, None), 0
        request = msgspec.structs.replace(reserve, segment_bytes=prepared.size_bytes)
        reserved: Reserved = self._call(request, deadline_s=reserve.deadline_s)
        return self._payload.write(prepared, reserved.place), reserved.reservation

    def _fetch(self, leased: Leased) -> Batch | None:
        """Read the rows of a lease; None if some are unreadable, which ends the lease and generates them again."""
        segments: dict[int, Batch] = {}
        for number, batch in self._read_all(leased.places):
            if isinstance(batch, SegmentError):
                self._call(Lost(number, str(batch)))
                self._call(Release(leased.lease_id))
                return None
            segments[number] = batch
        return join(leased, segments.__getitem__)

    def _read_all(self, places: Mapping[int, Any]) -> list[tuple[int, Batch | SegmentError]]:
        """Read every segment, in parallel because checksums dominate the cost; a failed read returns its error."""

        def read(item: tuple[int, Any]) -> tuple[int, Batch | SegmentError]:
            number, place = item
            try:
                return number, self._payload.read(number, place)
            except UndeclaredColumnError:
                raise  # the rows are intact, and other clients can read them
            except SegmentError as error:
                return number, error

        if len(places) == 1 or not self._payload.is_slow:
            return [read(item) for item in places.items()]
        return list(_readers().map(read, places.items()))

    def _call(self, request: Request, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Any:
        """Return the reply to a request, or raise the error with which it was refused."""
        reply = self._send(request, deadline_s=deadline_s)
        if isinstance(reply, Refused):
            if reply.kind == "NotReadyError" and reply.text.startswith("reservation"):
                raise _ReservationLostError(reply.text)
            kind = getattr(errors, reply.kind, errors.RLError)
            raise kind(reply.text)
        return reply


@cache
def _readers() -> ThreadPoolExecutor:
    """Return the threads that read segments for all queues of this process."""
    return ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_READERS), thread_name_prefix="read segments")


class _ReservationLostError(errors.RLError):
    """The queue's server restarted while this process was writing."""
