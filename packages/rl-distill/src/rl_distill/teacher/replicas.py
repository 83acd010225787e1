"""A teacher of several equal replicas: an idle one scores, a dead one is started anew."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import structlog

from rl_core.data.row_keys import RowKey
from rl_core.errors import DeadlineError, EngineDiedError, NotReadyError, RLError, TeacherError
from rl_distill.teacher.protocol import TeacherReplica
from rl_distill.teacher.scores import TeacherRow, TeacherScores

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
MakeReplica = Callable[[int], TeacherReplica]
"""Makes the replica of a number, not started; called again after each death."""

PROBE_TOKENS = 4
"""Length of the sequence that proves that a replica serves what it served before."""
PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""How far its logprobs may then be from those of before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPlan:
    """What a teacher is asked for, and how long it may take.

    Attributes:
        name: Of the teacher.
        num_replicas: How many there are.
        top_k: Likeliest tokens to give beside the sampled one.
        with_hidden: Give hidden states too.
        restarts: How often each replica may be started again.
        dtype: What it computes in.
        sleeps: Whether it frees its memory after use, where it can.
        deadline_s: Longest wait for scores.
        start_deadline_s: Longest wait for a replica to start, or to wake.
    """

    name: str
    num_replicas: int = 1
    top_k: int = 0
    with_hidden: bool = False
    restarts: int = 3
    dtype: str = "float32"
    sleeps: bool = True
    deadline_s: float = 3600.0
    start_deadline_s: float = 900.0


class _Traits(NamedTuple):
    """What every replica is, known once the first has started."""

    max_tokens: int
    vocab_size: int
    hidden_size: int | None


class _Place:
    """A replica's place, and who is there."""

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
    """A `Teacher` over replicas; see the protocol for its methods.

    A replica that dies is started again while the others go on, `restarts` times; who asked it gets EngineDiedError,
    so that the lease can be given back. The next caller waits for one that serves.
    """

    def __init__(self, plan: TeacherPlan, make: MakeReplica, *, say: Callable[..., None] | None = None) -> None:
        """Make the replicas; `start` starts them.

        Args:
            plan: What is asked of them.
            make: Makes one, by its number; again after each death.
            say: Takes events: deaths and restarts, with their fields.
        """
        self._plan = plan
        self._make = make
        self._say = say or _log_only
        self._places = [_Place(index, make(index)) for index in range(plan.num_replicas)]
        self._changed = asyncio.Condition()
        self._busy_s = 0.0
        self._traits: _Traits | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """See `Teacher.name`."""
        return self._plan.name

    @property
    def num_replicas(self) -> int:
        """See `Teacher.num_replicas`."""
        return len(self._places)

    @property
    def at_once(self) -> int:
        """See `Teacher.at_once`."""
        return sum(place.replica.at_once for place in self._places)

    @property
    def max_tokens(self) -> int:
        """See `Teacher.max_tokens`."""
        return self._known().max_tokens

    @property
    def vocab_size(self) -> int:
        """See `Teacher.vocab_size`."""
        return self._known().vocab_size

    @property
    def hidden_size(self) -> int | None:
        """See `Teacher.hidden_size`."""
        return self._known().hidden_size if self._plan.with_hidden else None

    @property
    def num_restarts(self) -> int:
        """See `Teacher.num_restarts`."""
        return sum(place.num_restarts for place in self._places)

    @property
    def busy_s(self) -> float:
        """See `Teacher.busy_s`."""
        now = time.monotonic()
        return self._busy_s + sum(now - place.busy_since for place in self._places if place.num_calls)

    async def start(self) -> None:
        """See `Teacher.start`; where a replica cannot start, none is left."""
        starts = await asyncio.gather(*(self._start(place) for place in self._places), return_exceptions=True)
        errors = [error for error in starts if isinstance(error, BaseException)]
        if errors:
            await self.close()
            raise errors[0]

    async def score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        """See `Teacher.score`."""
        plan = self._plan
        self._check_lengths(rows)
        what = f"scores of {len(rows)} trajectories, the first of prompt {rows[0].key.prompt_uid!r}"
        return await self._within(plan.deadline_s, self._score(rows), what=what)

    async def wake(self) -> None:
        """See `Teacher.wake`."""
        await asyncio.gather(*(self._wake(place) for place in self._places if place.is_serving))

    async def sleep(self) -> None:
        """See `Teacher.sleep`."""
        if self._plan.sleeps:
            await asyncio.gather(*(self._sleep(place) for place in self._places if place.is_serving))

    async def close(self) -> None:
        """See `Teacher.close`; the first error is raised when all are closed."""
        self._is_closed = True
        restarts = [place.restarting for place in self._places if place.restarting is not None]
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        closed = await asyncio.gather(*(place.replica.close() for place in self._places), return_exceptions=True)
        for place in self._places:
            place.is_serving = False
        for error in closed:
            if isinstance(error, BaseException):
                raise error

    # -- inside

    async def _score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        place = await self._idle()
        replica = place.replica
        self._begin(place)
        try:
            return await self._ask(replica, rows)
        except EngineDiedError as error:
            self._bury(place, replica, error)
            raise
        finally:
            await self._end(place)

    async def _ask(self, replica: TeacherReplica, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        plan = self._plan
        try:
            scores = await replica.score(rows, top_k=plan.top_k, with_hidden=plan.with_hidden)
        except (EngineDiedError, TeacherError):
            raise
        except RLError as error:
            raise TeacherError(f"teacher {plan.name!r} cannot score: {error}", teacher=plan.name) from error
        if len(scores) != len(rows):
            raise TeacherError(
                f"teacher {plan.name!r} must give the scores of {len(rows)} trajectories; found {len(scores)}.",
                teacher=plan.name,
            )
        return scores

    async def _idle(self) -> _Place:
        """The serving replica with the fewest calls; waits for a place, or for one that is being started again."""
        async with self._changed:
            while True:
                if not any(place.is_serving or place.restarting for place in self._places):
                    raise self._nobody_left()
                free = [p for p in self._places if p.is_serving and p.num_calls < p.replica.at_once]
                if free:
                    return min(free, key=lambda place: place.num_calls)
                await self._changed.wait()

    def _begin(self, place: _Place) -> None:
        if not place.num_calls:
            place.busy_since = time.monotonic()
        place.num_calls += 1

    async def _end(self, place: _Place) -> None:
        place.num_calls -= 1
        if not place.num_calls:
            self._busy_s += time.monotonic() - place.busy_since
        async with self._changed:
            self._changed.notify_all()

    def _bury(self, place: _Place, replica: TeacherReplica, error: BaseException) -> None:
        """Note a death, and begin the restart; of several callers the first one does."""
        if replica is not place.replica or not place.is_serving or self._is_closed:
            return
        place.is_serving, place.death = False, error
        is_over = place.num_restarts >= self._plan.restarts
        fields = {"teacher": self.name, "replica": place.index, "restarts_again": not is_over, "error": str(error)}
        log.warning("teacher_died", **fields)
        self._say("teacher_died", **fields)
        if not is_over:
            place.restarting = asyncio.get_running_loop().create_task(self._restart(place))

    async def _restart(self, place: _Place) -> None:
        """Start a replica in a dead one's place, as often as is left."""
        try:
            while place.num_restarts < self._plan.restarts and not place.is_serving:
                place.num_restarts += 1
                try:
                    await place.replica.close()
                    place.replica = self._make(place.index)
                    await self._start(place)
                    self._say("teacher_restarted", teacher=self.name, replica=place.index, restarts=place.num_restarts)
                except Exception as error:
                    place.death = error
                    log.warning("teacher_restart_failed", teacher=self.name, replica=place.index, error=str(error))
        finally:
            place.restarting = None
            async with self._changed:
                self._changed.notify_all()

    async def _start(self, place: _Place) -> None:
        """Start a replica, and have it prove that it serves what another one, or its former life, does."""
        try:
            await self._within(self._plan.start_deadline_s, place.replica.start(), what=f"replica {place.index}")
            self._learn_traits(place.replica)
            await self._prove(place, what="after its start")
        except (TeacherError, DeadlineError):
            raise
        except RLError as error:
            raise TeacherError(
                f"teacher {self.name!r}, replica {place.index}, could not start: {error}", teacher=self.name
            ) from error
        place.is_serving = True

    async def _wake(self, place: _Place) -> None:
        try:
            what = f"replica {place.index} to wake"
            await self._within(self._plan.start_deadline_s, place.replica.wake(), what=what)
            await self._prove(place, what="after it was woken")
        except (EngineDiedError, TeacherError) as error:
            self._bury(place, place.replica, error)

    async def _sleep(self, place: _Place) -> None:
        if not place.replica.can_sleep:
            return
        try:
            what = f"replica {place.index} to sleep"
            await self._within(self._plan.start_deadline_s, place.replica.sleep(), what=what)
        except EngineDiedError as error:
            self._bury(place, place.replica, error)

    async def _prove(self, place: _Place, *, what: str) -> None:
        """Have a replica score a short sequence, and compare with the first answer that any gave."""
        row = _probe(place.replica.vocab_size)
        asked = f"replica {place.index} to score {PROBE_TOKENS} tokens {what}"
        (answer,) = await self._within(self._plan.start_deadline_s, self._ask(place.replica, [row]), what=asked)
        if not np.isfinite(answer.logprobs).all():
            raise TeacherError(
                f"teacher {self.name!r}, replica {place.index}, must give finite logprobs; of a short sequence {what} "
                f"it gave {answer.logprobs[1:, 0].tolist()}. Are there NaN or infinite numbers in its weights?",
                teacher=self.name,
            )
        first = next((other.answer for other in self._places if other.answer is not None), None)
        place.answer = place.answer or answer
        expected = (first or answer).logprobs[1:, 0]
        difference = float(np.abs(answer.logprobs[1:, 0] - expected).max())
        if not difference <= PROBE_TOLERANCES[self._plan.dtype]:
            raise TeacherError(
                f"teacher {self.name!r}, replica {place.index}, must score a short sequence {what} as before; its "
                f"logprobs were {expected.tolist()}, and are {answer.logprobs[1:, 0].tolist()}. Its weights are not "
                "what they were: set sleep = false for it, and look at its log.",
                teacher=self.name,
            )

    async def _within(self, deadline_s: float, work: Awaitable[Result], *, what: str) -> Result:
        since = time.strftime("%H:%M:%S")
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            states = ", ".join(f"replica {place.index} {_state(place)}" for place in self._places)
            raise DeadlineError(
                f"teacher {self.name!r}: waited {deadline_s:g} s, since {since}, for {what}; {states}. Give it longer "
                "(distillation.deadline_s, distillation.start_deadline_s), or more replicas."
            ) from None

    def _check_lengths(self, rows: Sequence[TeacherRow]) -> None:
        """Refuse a trajectory that the teacher cannot take whole."""
        for row in rows:
            if len(row.input_ids) > self.max_tokens:
                uid, session, output = row.key
                raise TeacherError(
                    f"teacher {self.name!r} scores at most {self.max_tokens} tokens; prompt {uid!r}, session "
                    f"{session}, output {output} has {len(row.input_ids)}. Raise its max_model_len, take a teacher "
                    "with more positions, or shorten prompts and responses.",
                    teacher=self.name,
                )

    def _learn_traits(self, replica: TeacherReplica) -> None:
        """Refuse a teacher that cannot give what is asked for, and remember what it is."""
        if self._plan.top_k > replica.most_top_k:
            raise TeacherError(
                f"teacher {self.name!r} gives at most {replica.most_top_k} likeliest tokens; distillation.top_k = "
                f"{self._plan.top_k}. Lower it.",
                teacher=self.name,
            )
        if self._plan.with_hidden and replica.hidden_size is None:
            raise TeacherError(
                f'teacher {self.name!r} gives no hidden states, which distribution = "full" needs; use engine = '
                '"megatron".',
                teacher=self.name,
            )
        self._traits = _Traits(replica.max_tokens, replica.vocab_size, replica.hidden_size)

    def _known(self) -> _Traits:
        if self._traits is None:
            raise NotReadyError(f"teacher {self.name!r} has not been started.")
        return self._traits

    def _nobody_left(self) -> TeacherError:
        deaths = "; ".join(
            f"replica {place.index}, after {place.num_restarts} restarts: {place.death or 'it was not started'}"
            for place in self._places
        )
        return TeacherError(
            f"teacher {self.name!r} has no replica left that could score. {deaths}. What ended it is in its log; "
            f"distillation.teachers.{self.name}.restarts allows more restarts.",
            teacher=self.name,
        )


def _log_only(event: str, **fields: Any) -> None:
    log.info(event, **fields)


def _probe(vocab_size: int) -> TeacherRow:
    ids = np.arange(1, PROBE_TOKENS + 1, dtype=np.int32) % vocab_size
    mask: Any = np.arange(PROBE_TOKENS) > 0
    return TeacherRow(key=RowKey("probe", 0, 0), input_ids=ids, loss_mask=mask)


def _state(place: _Place) -> str:
    if place.is_serving:
        return "serves"
    if place.restarting is not None:
        return f"is being started again (died: {place.death})"
    return f"is not serving (died: {place.death})" if place.death is not None else "is not serving"
