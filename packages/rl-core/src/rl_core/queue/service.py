"""Scheduling of requests to a queue: answers, waits, deadlines, and journal writes before answers."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_core.errors import DataError, DeadlineError, JournalError, NothingToLeaseError, RLError
from rl_core.queue.answers import leased_of, stats_of
from rl_core.queue.capacity import Capacity, SegmentStore
from rl_core.queue.core import QueueCore
from rl_core.queue.interface import QueueOptions, TaskSpec
from rl_core.queue.journal.database import Recovery, SqliteJournal
from rl_core.queue.messages import (
    GENERATE,
    Ack,
    Done,
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
    Unpin,
)
from rl_core.queue.picking import Blocked, check_once, describe_named

SHORTEST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 1.0
LARGEST_SEGMENT = 1 << 40

Answer = Callable[[Reply], None]


class _WaitingRequest(NamedTuple):
    """A waiting request."""

    request: LeaseRequest | Reserve | Put
    client: str
    answer: Answer
    since: float
    ends_at: float
    turn: int
    blocked: Blocked


class QueueService:
    """Serves requests to one queue's state; not thread-safe, and blocks only to write the journal.

    Callers `submit` any number of requests, then `run`: it retries waiting requests, writes changes, and only then
    sends answers.
    """

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        options: QueueOptions,
        *,
        clock: Callable[[], float],
        make_store: Callable[[], SegmentStore] | None = None,
        is_pinning: bool = False,
        reservation_s: float = float("inf"),
    ) -> None:
        """Open a queue.

        Args:
            tasks: Checked tasks.
            options: Bounds, and the journal's directory.
            clock: Returns seconds, for lease times.
            make_store: Returns the segment store once the journal's directory exists; None if requests provide
                segments.
            is_pinning: True if clients read segments in reusable memory and report when they are done.
            reservation_s: Maximum seconds for a client to write, for clients whose death cannot be detected.

        Raises:
            JournalError: The journal cannot be opened.
        """
        self.core = QueueCore(tasks, options)
        self._clock = clock
        self._journal: SqliteJournal | None = None
        self._recovery: Recovery | None = None
        if options.directory is not None:
            self._journal = SqliteJournal(Path(options.directory), tasks, options, clock=clock)
        try:
            store = None if make_store is None else make_store()
            if self._journal is not None and store is not None:
                self.core, self._recovery = self._journal.recover(store)
        except BaseException:
            if self._journal is not None:
                self._journal.close()  # otherwise its lock would block the directory for this process too
            raise
        self._capacity = Capacity(store, reservation_s=reservation_s)
        self._is_pinning = is_pinning
        self._leases: list[_WaitingRequest] = []
        self._puts: list[_WaitingRequest] = []
        self._answers: list[tuple[Answer, Reply]] = []
        self._waited_s = {"put": 0.0, "lease": 0.0}
        self._event: tuple[str, float] = ("nothing yet", time.time())
        self._pause_s = SHORTEST_PAUSE_S
        self._is_changed = False
        self._written_version = self.core.policy_version
        self._turn = 0
        self.num_waited = 0
        self.is_closed = False

    def submit(self, request: Request, client: str, answer: Answer) -> None:
        """Submit a request; the next or a later `run` answers it."""
        if self.is_closed:
            answer(Refused("NotReadyError", "the transfer queue is closed."))
            return
        try:
            self._expire()
            is_settled = isinstance(request, Put) and self.core.was_put(request.put_id, request.sessions)
            if isinstance(request, LeaseRequest | Reserve | Put) and not is_settled:
                self._check(request)
                blocked = Blocked()
                now = self._attempt(request, client, blocked)
                if now is None:
                    self._wait(request, client, answer, blocked)
                    return
                reply = now
            else:
                reply = self._handle(request, client)
        except RLError as error:
            self._give_up_reservation(request)
            reply = refusal(error)
        self._answers.append((answer, reply))

    def run(self) -> None:
        """Retry waiting requests, write changes, and send answers."""
        if self._leases or self._puts:
            if self.core.next_expiry() - self._clock() > LONGEST_PAUSE_S:
                self._pause_s = SHORTEST_PAUSE_S
            elif not self._is_changed:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._expire()
            self._is_changed = False
            while self._retry(self._leases, "lease") or self._retry(self._puts, "put"):
                pass
            self._refuse_late()
        self._write()
        self._turn += 1
        answers, self._answers = self._answers, []
        for answer, reply in answers:
            answer(reply)

    @property
    def num_waiting(self) -> int:
        """Number of unanswered requests."""
        return len(self._leases) + len(self._puts)

    def next_wake_s(self) -> float:
        """Return the seconds until `run` must be called even without new requests.

        A test's clock can stand still, so the pause doubles after each wake that finds the first lease still running.
        """
        until_expiry_s = max(self.core.next_expiry() - self._clock(), self._pause_s)
        ends = [waiting.ends_at for waiting in (*self._leases, *self._puts)]
        return min(until_expiry_s, *(end - time.monotonic() for end in ends), LONGEST_PAUSE_S * 60)

    def withdraw(self, answer: Answer, undelivered: int | None) -> None:
        """Remove requests whose client no longer listens, and take back undelivered leases."""
        self._leases = [waiting for waiting in self._leases if waiting.answer != answer]
        self._puts = [waiting for waiting in self._puts if waiting.answer != answer]
        if undelivered is not None and undelivered in self.core.leases:
            self.core.end_lease(undelivered, "was released because its consumer disconnected")
            self._note(f"lease {undelivered} was not delivered")

    def disconnect(self, client: str) -> None:
        """Release everything that an ended client had leased or reserved, and drop its requests."""
        self._leases = [waiting for waiting in self._leases if waiting.client != client]
        self._puts = [waiting for waiting in self._puts if waiting.client != client]
        self._capacity.give_up_of(client)
        self.core.drop_client(client)
        self._note(f"process {client} ended")

    def close(self) -> None:
        """Refuse waiting requests, and release the state."""
        self.is_closed = True
        for waiting in (*self._leases, *self._puts):
            self._answers.append((waiting.answer, Refused("NotReadyError", "the transfer queue is closed.")))
        self._leases, self._puts = [], []
        answers, self._answers = self._answers, []
        for answer, reply in answers:
            answer(reply)
        self.core = QueueCore(tuple(self.core.specs.values()), self.core.options)
        if self._journal is not None:
            self._journal.close()

    # -- requests that need no waiting

    def _handle(self, request: Request, client: str) -> Reply:
        core, now = self.core, self._clock()
        value: Any = None
        match request:
            case Issue():
                if not (request.is_retry and all(uid in core.groups for uid, _ in request.prompts)):
                    core.issue(request.prompts, num_sessions=request.num_sessions, now=now)
                self._note(f"issue of {len(request.prompts)} prompts")
            case Put():
                pass  # already applied; its first answer was lost
            case Fail():
                self._fail(request)
            case Drop():
                group = core.groups.get(request.prompt_uid)
                if not (request.is_retry and group is not None and group.reason == request.reason):
                    core.drop(
                        core.groups.find_open(request.prompt_uid), request.reason, reissue=request.reissue, now=now
                    )
                self._note(f"drop of prompt {request.prompt_uid!r}")
            case Extend():
                value = now + request.lease_s
                core.extend(core.current(request.lease_id, request.task), expires_at=value)
                self._note(f"lease {request.lease_id} extended")
            case Ack():
                self._ack(request)
            case Finish():
                if not (request.is_retry and core.was_acked(request.number)):
                    core.finish(request)
                self._note(f"finish of {len(request.prompts)} prompts by task {request.task!r}")
            case Release():
                if request.lease_id in core.leases:
                    core.end_lease(request.lease_id, "was released")
                    self._note(f"release of lease {request.lease_id}")
            case Lost():
                count = core.lost(request.segment_id, request.reason, now=now)
                self._note(f"segment {request.segment_id} of {count} prompts is lost: {request.reason}")
            case Unpin():
                for number in request.segment_ids:
                    core.segments.unpin(number, client)
            case SetPolicyVersion():
                core.policy_version = max(core.policy_version, request.version)
                self._note(f"policy version {request.version}")
            case StateQuery():
                value = self._state(request)
        return Done(value)

    def _fail(self, request: Fail) -> None:
        group = self.core.groups.get(request.prompt_uid)
        if request.is_retry and group and group.failures.get(request.session_index) == request.reason:
            return
        self.core.fail(request.prompt_uid, request.session_index, request.reason)
        self._note(f"failed session {request.session_index} of prompt {request.prompt_uid!r}")

    def _ack(self, request: Ack) -> None:
        if request.is_retry and request.lease_id not in self.core.leases and self.core.was_acked(request.lease_id):
            return
        self.core.current(request.lease_id, request.task)  # a restarted server knows no reservations
        place = request.place
        if request.reservation:
            place = self._capacity.find(request.reservation).place or place
        self.core.ack(msgspec.structs.replace(request, place=place))
        if request.reservation:
            self._capacity.end(request.reservation)
        self._note(f"ack of lease {request.lease_id} by task {request.task!r}")

    def _state(self, query: StateQuery) -> Any:
        core, now = self.core, self._clock()
        match query.what:
            case "stats":
                stats = stats_of(core, now=now)
                stats |= {"rows/reserved": self._capacity.num_rows, "size_bytes/reserved": self._capacity.size_bytes}
                stats |= {"waiting/put": len(self._puts), "waiting/lease": len(self._leases)}
                stats |= {f"waited_s/{name}": waited for name, waited in self._waited_s.items()}
                return {name: float(value) for name, value in stats.items()}
            case "ledger":
                return msgspec.to_builtins([group.entry() for group in core.groups])
            case "unsettled":
                return [
                    (
                        group.prompt,
                        group.missing_sessions,
                        now - group.issued_at,
                        group.attempt,
                        GENERATE in group.leased,
                    )
                    for group in sorted(core.groups.issued.values(), key=lambda group: group.order)
                ]
            case "recovery":
                return msgspec.to_builtins(self._recovery)
            case "forget_finished":
                self._is_changed = True
                return core.forget_finished()

    # -- requests that may wait

    def _check(self, request: LeaseRequest | Reserve | Put) -> None:
        core = self.core
        if isinstance(request, LeaseRequest):
            core.groups.task_of(request)
            if request.groups < 1:
                raise DataError(f"a lease must request at least 1 group; found {request.groups}.")
            check_once(request.prompts)
        elif isinstance(request, Reserve) and not 0 <= request.segment_bytes <= LARGEST_SEGMENT:
            raise DataError(f"a segment must have at most {LARGEST_SEGMENT} bytes; found {request.segment_bytes}.")

    def _wait(self, request: LeaseRequest | Reserve | Put, client: str, answer: Answer, blocked: Blocked) -> None:
        now = time.monotonic()
        waiting = _WaitingRequest(request, client, answer, now, now + request.deadline_s, self._turn, blocked)
        (self._leases if isinstance(request, LeaseRequest) else self._puts).append(waiting)

    def _retry(self, queue: list[_WaitingRequest], kind: str) -> bool:
        """Retry waiting requests, first come first served; return True if any was answered."""
        done, num_changes = [], self.core.num_changes
        for waiting in queue:
            try:
                reply = self._attempt(waiting.request, waiting.client, waiting.blocked)
            except RLError as error:
                self._give_up_reservation(waiting.request)
                reply = refusal(error)
            if reply is not None:
                done.append(waiting)
                self._waited(kind, waiting)
                self._answers.append((waiting.answer, reply))
        queue[:] = [waiting for waiting in queue if waiting not in done] if done else queue
        return bool(done) or self.core.num_changes > num_changes  # a lease drops stale groups

    def _attempt(self, request: LeaseRequest | Reserve | Put, client: str, blocked: Blocked) -> Reply | None:
        """Return the answer of a request that may wait; None while it cannot be served."""
        if not isinstance(request, LeaseRequest):
            return self._try_put(request, client)
        groups = self.core.groups
        lease = self.core.try_lease(request, now=self._clock(), client=client, blocked=blocked)
        if lease is None:
            task = groups.task_of(request)
            if task.num_possible == 0 and not task.is_of_claims and not request.prompts:
                raise NothingToLeaseError(
                    f"task {request.task!r} requested {request.groups} groups, but no issued prompt can become ready "
                    f"for it: {groups.describe_states()}."
                )
            return None
        self._note(f"lease {lease.lease_id} of {len(lease.groups)} groups for task {request.task!r}")
        leased = leased_of(self.core, lease)
        if self._is_pinning:
            for number, place in leased.places.items():
                if not isinstance(place, bytes):  # bytes are sent with the answer
                    self.core.segments.pin(number, client)
        return leased

    def _try_put(self, request: Reserve | Put, client: str) -> Reply | None:
        self.core.check_sessions(request.sessions)
        if isinstance(request, Put) and request.reservation:
            held = self._capacity.find(request.reservation)
            self.core.put(msgspec.structs.replace(request, place=held.place or request.place))
            self._capacity.end(request.reservation)
            return self._has_put(request)
        if isinstance(request, Put):
            num_rows = sum(part.num_rows for part in request.parts)
            size_bytes = sum(part.size_bytes for part in request.parts)
        else:
            num_rows, size_bytes = request.num_rows, request.size_bytes
        waiting = {waiting.request.task for waiting in self._leases}  # type: ignore[union-attr]
        if not self._capacity.fits(self.core, num_rows, size_bytes, waiting_tasks=waiting):
            return None
        if isinstance(request, Put):
            self.core.put(request)
            return self._has_put(request)
        return Reserved(*self._capacity.reserve(request, client))

    def _has_put(self, request: Put) -> Done:
        uid, indices = request.sessions[0]
        num_more = sum(len(more) for _, more in request.sessions) - 1
        self._note(f"put of session {indices[0]} of prompt {uid!r}{f' and {num_more} more' if num_more else ''}")
        return Done()

    def _give_up_reservation(self, request: Any) -> None:
        """Free the reservation of a refused request; its client reserves again."""
        if isinstance(request, Put | Ack) and request.reservation:
            self._capacity.give_up(request.reservation, request.place)

    # -- time

    def _refuse_late(self) -> None:
        now = time.monotonic()
        event = f"{self._event[0]}, at {time.strftime('%H:%M:%S', time.localtime(self._event[1]))}"
        for queue in (self._leases, self._puts):
            for waiting in [waiting for waiting in queue if waiting.ends_at <= now]:
                queue.remove(waiting)
                self._waited("lease" if queue is self._leases else "put", waiting)
                text = (
                    f"{self._describe(waiting.request)}, for {round(waiting.request.deadline_s, 3):g} s; "
                    f"the queue's last event: {event}."
                )
                self._answers.append((waiting.answer, refusal(DeadlineError(text))))

    def _waited(self, kind: str, waiting: _WaitingRequest) -> None:
        if waiting.turn < self._turn:
            self.num_waited += 1
            self._waited_s[kind] += time.monotonic() - waiting.since

    def _describe(self, request: LeaseRequest | Reserve | Put) -> str:
        groups, options = self.core.groups, self.core.options
        if isinstance(request, LeaseRequest):
            if request.prompts:
                found = describe_named(groups, request)
            else:
                found = groups.describe_wait(groups.task_of(request), now=self._clock())
            return f"lease of {request.groups} groups for task {request.task!r} waited: {found}"
        rows = request.num_rows if isinstance(request, Reserve) else sum(part.num_rows for part in request.parts)
        held = f"{groups.num_rows} of {options.capacity_rows} rows stored"
        if options.capacity_bytes is not None:
            held += f", {groups.size_bytes} of {options.capacity_bytes} bytes"
        if self._capacity.num_rows:
            held += f", {self._capacity.num_rows} rows being written by {self._capacity.clients}"
        return f"put of {rows} rows waited for capacity: {held}, {groups.describe_states()}"

    def _note(self, event: str) -> None:
        self._event = (event, time.time())
        self._is_changed = True

    def _expire(self) -> None:
        self._capacity.give_up_late(self._note)
        for lease_id in self.core.expire(now=self._clock()):
            self._pause_s = SHORTEST_PAUSE_S
            self._note(f"lease {lease_id} expired")

    # -- the journal

    def _write(self) -> None:
        core = self.core
        is_new_version = core.policy_version != self._written_version
        if self._journal is not None and (core.dirty or core.segments.freed or core.forgotten or is_new_version):
            try:
                self._journal.write(core)
            except JournalError as error:
                self._fall_back(error)
                return
            except (TypeError, ValueError, msgspec.MsgspecError) as error:  # a request cannot be stored
                self._fall_back(JournalError(f"a change cannot be stored: {error}."))
                return
            self._written_version = core.policy_version
        for _, place in core.segments.freed:
            self._capacity.free(place)
        core.dirty.clear()
        core.forgotten.clear()
        core.segments.added.clear()
        core.segments.freed.clear()

    def _fall_back(self, error: JournalError) -> None:
        """Continue from the journal's state and discard changes that could not be written."""
        core, old = self.core, self.core.segments
        for _, reply in self._answers:
            if isinstance(reply, Reserved):
                self._capacity.give_up(reply.reservation)
            if isinstance(reply, Leased) and self._is_pinning and reply.lease_id in core.leases:
                for number in reply.places:
                    old.unpin(number, core.leases[reply.lease_id].client)
        places = {number: place for number, place in old.freed if number in old.added}
        places |= {number: old.place(number) for number in old.added if number in old}
        for place in places.values():
            self._capacity.free(place)
        if self._journal is not None:
            self.core = self._journal.load(old.pins())
            self.core.number_after(core)
            self._written_version = self.core.policy_version
        self._answers = [(answer, refusal(error)) for answer, _ in self._answers]
        self._note(f"the journal could not be written: {error}")


def refusal(error: RLError) -> Refused:
    """Convert an error to an answer."""
    return Refused(type(error).__name__, str(error))
