"""A teacher with several identical replicas; dead ones are restarted."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import structlog

from rl_core.errors import DeadlineError, EngineDiedError, NotReadyError, RLError, TeacherError
from rl_core.gpus import GpuUse, gpu_use_of
from rl_distill.teacher.protocol import TeacherPlan, TeacherReplica, TeacherTraits
from rl_distill.teacher.scores import PROBE_TOKENS, TeacherRow, TeacherScores, probe_problem, probe_row

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
MakeReplica = Callable[[int], TeacherReplica]
"""Creates the replica with a given index, without starting it; called again after each death."""


class _ReplicaSlot:
    """A slot for a replica."""

    def __init__(self, index: int, replica: TeacherReplica) -> None:
        self.index = index
        self.replica = replica
        self.is_serving = False
        self.num_calls = 0
        self.num_restarts = 0
        self.busy_since = 0.0
        self.answer: TeacherScores | None = None
        self.death: BaseException | None = None
        self.restarting: asyncio.Task[None] | None = None


class ReplicatedTeacher:
    """A teacher with replicas; used from one event loop.

    A dead replica is restarted up to `restarts` times while the others continue. Its caller gets EngineDiedError, and
    can release its lease. The next caller waits for a serving replica.

    A teacher with known traits can start on demand, at the first `score`. If all scores are cached, none of its
    processes ever runs.

    Attributes:
        is_started: Whether the model was loaded.
    """

    def __init__(
        self,
        plan: TeacherPlan,
        make: MakeReplica,
        *,
        traits: TeacherTraits | None = None,
        say: Callable[..., None] | None = None,
    ) -> None:
        """Create the replicas; `start` starts them.

        Args:
            plan: Requests to the replicas.
            make: Creates a replica by its index, and again after each death.
            traits: Traits known before the start. If set, `score` starts and wakes the teacher, and `start` and `wake`
                do nothing.
            say: Receives events, such as deaths and restarts, with their fields.
        """
        self._plan = plan
        self._make = make
        self._say = say or log.info
        self._slots = [_ReplicaSlot(index, make(index)) for index in range(plan.num_replicas)]
        self._changed = asyncio.Condition()
        self._busy_s = 0.0
        self._traits = traits
        self._is_on_demand = traits is not None
        self.is_started = self._is_awake = False
        self._starting = asyncio.Lock()
        self._is_closed = False

    @property
    def name(self) -> str:
        """Name in settings, metrics and errors."""
        return self._plan.name

    @property
    def num_replicas(self) -> int:
        """Number of replicas that score in parallel."""
        return len(self._slots)

    @property
    def at_once(self) -> int:
        """Number of concurrent calls of `score` that keep the replicas busy."""
        return sum(slot.replica.at_once for slot in self._slots)

    @property
    def max_tokens(self) -> int:
        """Maximum trajectory length in tokens."""
        return self._known().max_tokens

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        return self._known().vocab_size

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states; None without them."""
        is_known = self._plan.with_hidden or (self._is_on_demand and not self.is_started)
        return self._known().hidden_size if is_known else None

    @property
    def num_restarts(self) -> int:
        """Number of restarts so far."""
        return sum(slot.num_restarts for slot in self._slots)

    @property
    def busy_s(self) -> float:
        """Seconds of scoring so far, summed over replicas."""
        now = time.monotonic()
        return self._busy_s + sum(now - slot.busy_since for slot in self._slots if slot.num_calls)

    async def start(self) -> None:
        """Load the model, unless it starts on demand; if a replica cannot start, close all of them.

        Raises:
            TeacherError: A replica cannot start, or does not support the request.
            DeadlineError: A replica did not start in time.
        """
        if not self._is_on_demand:
            await self._start_all()

    async def _start_all(self) -> None:
        error = await first_error(self._start(slot) for slot in self._slots)
        if error is not None:
            await self.close()
            raise error
        self.is_started = self._is_awake = True

    async def score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        """Score trajectories; the scores are returned in order, unchecked.

        Raises:
            EngineDiedError: The replica died while scoring; another one can score the trajectories.
            TeacherError: The teacher cannot score the trajectories, or has no replica left.
            DeadlineError: The scores did not arrive in time.
        """
        plan = self._plan
        if self._is_on_demand:
            async with self._starting:
                if not self.is_started:
                    await self._start_all()
                elif not self._is_awake:
                    await self._wake_all()
        self._check_lengths(rows)
        what = f"scores of {len(rows)} trajectories, the first of prompt {rows[0].key.prompt_uid!r}"
        return await self._within(plan.deadline_s, self._score(rows), what=what)

    async def gpu_use(self) -> list[GpuUse]:
        """Return the use of each GPU of the serving replicas since the last call; empty on CPUs."""
        asked = await asyncio.gather(*(gpu_use_of(slot.replica) for slot in self._slots if slot.is_serving))
        return [one for of_replica in asked for one in of_replica]

    async def wake(self) -> None:
        """Restore the freed memory, and restart replicas whose scores changed.

        Raises:
            DeadlineError: A replica did not wake in time.
        """
        if not self._is_on_demand:
            await self._wake_all()

    async def _wake_all(self) -> None:
        await asyncio.gather(*(self._wake(slot) for slot in self._slots if slot.is_serving))
        self._is_awake = True

    async def sleep(self) -> None:
        """Free memory until `wake`, if the replicas can."""
        async with self._starting:
            is_needed, self._is_awake = self._is_awake or not self._is_on_demand, False
            if is_needed and self._plan.sleeps:
                await asyncio.gather(*(self._sleep(slot) for slot in self._slots if slot.is_serving))

    async def close(self) -> None:
        """Stop every replica, then raise the first error. Can be called twice."""
        self._is_closed = True
        restarts = [slot.restarting for slot in self._slots if slot.restarting is not None]
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        error = await first_error(slot.replica.close() for slot in self._slots)
        for slot in self._slots:
            slot.is_serving = False
        if error is not None:
            raise error

    # -- internal

    async def _score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        slot = await self._idle()
        replica = slot.replica
        if not slot.num_calls:
            slot.busy_since = time.monotonic()
        slot.num_calls += 1
        try:
            return await self._request(replica, rows)
        except EngineDiedError as error:
            self._record_death(slot, replica, error)
            raise
        finally:
            slot.num_calls -= 1
            if not slot.num_calls:
                self._busy_s += time.monotonic() - slot.busy_since
            async with self._changed:
                self._changed.notify_all()

    async def _request(self, replica: TeacherReplica, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        plan = self._plan
        try:
            scores = await replica.score(rows, top_k=plan.top_k, with_hidden=plan.with_hidden)
        except (EngineDiedError, TeacherError):
            raise
        except RLError as error:
            raise self._error(f"cannot score: {error}") from error
        if len(scores) != len(rows):
            raise self._error(f"must return scores of {len(rows)} trajectories; found {len(scores)}.")
        return scores

    async def _idle(self) -> _ReplicaSlot:
        """Return the serving replica with the fewest calls; wait until one is free or restarted."""
        async with self._changed:
            while True:
                if not any(slot.is_serving or slot.restarting for slot in self._slots):
                    raise self._none_left()
                free = [p for p in self._slots if p.is_serving and p.num_calls < p.replica.at_once]
                if free:
                    return min(free, key=lambda slot: slot.num_calls)
                await self._changed.wait()

    def _record_death(self, slot: _ReplicaSlot, replica: TeacherReplica, error: BaseException) -> None:
        """Record a death and start the restart; only the first of several callers has an effect."""
        if replica is not slot.replica or not slot.is_serving or self._is_closed:
            return
        slot.is_serving, slot.death = False, error
        is_over = slot.num_restarts >= self._plan.restarts
        fields = {"teacher": self.name, "replica": slot.index, "restarts_again": not is_over, "error": str(error)}
        log.warning("teacher_died", **fields)
        self._say("teacher_died", **fields)
        if not is_over:
            slot.restarting = asyncio.get_running_loop().create_task(self._restart(slot))

    async def _restart(self, slot: _ReplicaSlot) -> None:
        """Replace a dead replica by a new one, as long as restarts remain."""
        try:
            while slot.num_restarts < self._plan.restarts and not slot.is_serving:
                slot.num_restarts += 1
                try:
                    await slot.replica.close()
                    slot.replica = self._make(slot.index)
                    await self._start(slot)
                    self._say("teacher_restarted", teacher=self.name, replica=slot.index, restarts=slot.num_restarts)
                except Exception as error:
                    slot.death = error
                    log.warning("teacher_restart_failed", teacher=self.name, replica=slot.index, error=str(error))
        finally:
            slot.restarting = None
            async with self._changed:
                self._changed.notify_all()

    async def _start(self, slot: _ReplicaSlot) -> None:
        """Start a replica, and compare its scores with those of another or an earlier replica."""
        try:
            await self._within(self._plan.start_deadline_s, slot.replica.start(), what=f"replica {slot.index}")
            self._learn_traits(slot.replica)
            await self._prove(slot, what="after its start")
        except (TeacherError, DeadlineError):
            raise
        except RLError as error:
            raise self._error(f"could not start: {error}", replica=slot.index) from error
        slot.is_serving = True

    async def _wake(self, slot: _ReplicaSlot) -> None:
        try:
            what = f"replica {slot.index} to wake"
            await self._within(self._plan.start_deadline_s, slot.replica.wake(), what=what)
            await self._prove(slot, what="after it was woken")
        except (EngineDiedError, TeacherError) as error:
            self._record_death(slot, slot.replica, error)

    async def _sleep(self, slot: _ReplicaSlot) -> None:
        if not slot.replica.can_sleep:
            return
        try:
            what = f"replica {slot.index} to sleep"
            await self._within(self._plan.start_deadline_s, slot.replica.sleep(), what=what)
        except EngineDiedError as error:
            self._record_death(slot, slot.replica, error)

    async def _prove(self, slot: _ReplicaSlot, *, what: str) -> None:
        """Let a replica score a short sequence, and compare the result with the first answer of any replica."""
        row = probe_row(slot.replica.traits.vocab_size)
        scoring = f"replica {slot.index} to score {PROBE_TOKENS} tokens {what}"
        (answer,) = await self._within(self._plan.start_deadline_s, self._request(slot.replica, [row]), what=scoring)
        first = next((other.answer for other in self._slots if other.answer is not None), answer)
        if problem := probe_problem(answer, first, dtype=self._plan.dtype, what=what):
            raise self._error(problem, replica=slot.index)
        slot.answer = slot.answer or answer

    async def _within(self, deadline_s: float, work: Awaitable[Result], *, what: str) -> Result:
        since = time.strftime("%H:%M:%S")
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            states = ", ".join(f"replica {slot.index} {_state(slot)}" for slot in self._slots)
            raise DeadlineError(
                f"teacher {self.name!r}: waited {deadline_s:g} s, since {since}, for {what}; {states}. Raise "
                "distillation.deadline_s or distillation.start_deadline_s, or add replicas."
            ) from None

    def _check_lengths(self, rows: Sequence[TeacherRow]) -> None:
        """Check that trajectories do not exceed the teacher's maximum length."""
        for row in rows:
            if len(row.input_ids) > self.max_tokens:
                uid, session, output = row.key
                raise self._error(
                    f"scores at most {self.max_tokens} tokens; prompt {uid!r}, session {session}, output {output} has "
                    f"{len(row.input_ids)}. Raise its max_model_len, use a teacher with more positions, or shorten "
                    "prompts and responses."
                )

    def _learn_traits(self, replica: TeacherReplica) -> None:
        """Check that a replica supports the request, and store its traits."""
        if self._plan.top_k > replica.most_top_k:
            raise self._error(
                f"returns at most {replica.most_top_k} most likely tokens; found distillation.top_k = "
                f"{self._plan.top_k}. Lower it."
            )
        if self._plan.with_hidden and replica.traits.hidden_size is None:
            raise self._error('returns no hidden states, which distribution = "full" needs; use engine = "megatron".')
        self._traits = replica.traits

    def _known(self) -> TeacherTraits:
        if self._traits is None:
            raise NotReadyError(f"teacher {self.name!r} has not started.")
        return self._traits

    def _none_left(self) -> TeacherError:
        deaths = "; ".join(
            f"replica {slot.index}, after {slot.num_restarts} restarts: {slot.death or 'it was not started'}"
            for slot in self._slots
        )
        return self._error(
            f"has no replica left to score. {deaths}. Its log has the cause; raise "
            f"distillation.teachers.{self.name}.restarts to allow more restarts."
        )

    def _error(self, problem: str, *, replica: int | None = None) -> TeacherError:
        who = f"teacher {self.name!r}" + ("" if replica is None else f", replica {replica},")
        return TeacherError(f"{who} {problem}", teacher=self.name)


async def first_error(work: Iterable[Awaitable[object]]) -> BaseException | None:
    """Wait for all of the work, even if some of it fails; return the first error."""
    results = await asyncio.gather(*work, return_exceptions=True)
    return next((result for result in results if isinstance(result, BaseException)), None)


def _state(slot: _ReplicaSlot) -> str:
    if slot.is_serving:
        return "serves"
    if slot.restarting is not None:
        return f"is being restarted (died: {slot.death})"
    return f"is not serving (died: {slot.death})" if slot.death is not None else "is not serving"
