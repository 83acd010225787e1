"""The teachers' queue task: score trajectories while others are still being generated."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from rl_core import TransferQueue
from rl_core.data import Column
from rl_core.errors import (
    DeadlineError,
    EngineDiedError,
    NothingToLeaseError,
    NotReadyError,
    OutdatedLeaseError,
    RLError,
    TeacherError,
)
from rl_core.gpus import GpuUse
from rl_core.queue import Lease, TaskSpec
from rl_core.record_fields import settings_record
from rl_distill.background import in_daemon_thread
from rl_distill.teacher.aligned import TeacherAligner
from rl_distill.teacher.replicas import ReplicatedTeacher, first_error
from rl_distill.teacher.routing import TeacherRouter
from rl_distill.teacher.score_cache import ScoreCache
from rl_distill.teacher.scores import ScoreShape, TeacherRow, TeacherScores, teacher_columns
from rl_distill.teacher.scoring import ServedTeacher, ServiceReport, Tally


async def lease_group(queue: TransferQueue, task: str, *, deadline_s: float, lease_s: float) -> Lease:
    """Lease one group without blocking the event loop.

    If this call is cancelled, its thread keeps waiting. It releases a late lease at once, so that the queue delivers
    the group again.

    Raises:
        NothingToLeaseError: No issued group can become ready.
        DeadlineError: No group became ready in time.
        NotReadyError: The queue was closed.
    """
    lease_one = partial(queue.lease, task, groups=1, deadline_s=deadline_s, lease_s=lease_s)
    found = in_daemon_thread(lease_one, name=f"lease for {task}")
    try:
        return await asyncio.wrap_future(found)
    except BaseException:
        found.add_done_callback(lambda ended: _release(queue, ended))
        raise


def _release(queue: TransferQueue, ended: Future[Lease]) -> None:
    """Release a lease that no caller waits for, as soon as it arrives."""
    if ended.exception() is None:
        with suppress(NotReadyError):
            queue.release(ended.result())


Result = TypeVar("Result")

TASK = "teacher"
SPARE_LEASES = 32
"""Groups leased in addition to those being scored, so that no teacher waits for the queue or a replica's restart."""


@settings_record
class TeacherServiceOptions:
    """Requests to all teachers.

    Attributes:
        vocab_size: Size of the student's vocabulary.
        top_k: Number of most likely tokens in addition to the sampled one.
        with_hidden: Also return hidden states.
        deadline_s: Maximum seconds for the remaining scores after the last rollout.
    """

    vocab_size: int
    top_k: int = 0
    with_hidden: bool = False
    deadline_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A lease that is being scored.

    Attributes:
        teachers: Names of the teachers that score it.
        prompt_uid: Uid of its first prompt.
        since: Start of scoring, in seconds since the epoch.
    """

    teachers: tuple[str, ...]
    prompt_uid: str
    since: float


def teacher_task(*, with_hidden: bool = False, with_aligner: bool = False) -> TaskSpec:
    """Return the specification of the queue task that the service serves.

    Args:
        with_hidden: Teachers also return hidden states.
        with_aligner: Some teachers have another tokenizer, so the task also needs the student's logprobs.
    """
    hidden = {"teacher_hidden"} if with_hidden else set()
    own = {"rollout_logprobs"} if with_aligner else set()
    return TaskSpec(
        name=TASK,
        needs=frozenset({"input_ids", "loss_mask"} | own),
        gives=frozenset({"teacher_logprobs", "teacher_ids", "teacher_index"} | hidden),
        order="arrival",
    )


class TeacherService:
    """Leases groups as they arrive, lets each prompt's teacher score them, checks the scores, and acks.

    If a teacher dies while scoring a group, the lease is released and the queue delivers the group again. A group is
    acked only with scores of every trajectory of every session.

    Attributes:
        report: Report of the last `serve_while`; empty before the first.
    """

    def __init__(
        self,
        teachers: Sequence[ReplicatedTeacher],
        router: TeacherRouter,
        options: TeacherServiceOptions,
        *,
        caches: Mapping[str, ScoreCache] | None = None,
        aligners: Mapping[str, TeacherAligner] | None = None,
        say: Callable[..., None] | None = None,
    ) -> None:
        """Combine teachers; they must not be started yet.

        Args:
            teachers: Teachers in the order of the settings, which defines `teacher_index`.
            router: Selects the teacher of a prompt.
            options: Requests to all teachers.
            caches: Score caches by teacher name.
            aligners: Aligners by the name of teachers with another tokenizer.
            say: Receives events with their names and fields.
        """
        self._teachers = {teacher.name: teacher for teacher in teachers}
        self._served = {
            teacher.name: ServedTeacher(
                teacher=teacher,
                index=index,
                cache=(caches or {}).get(teacher.name),
                aligner=(aligners or {}).get(teacher.name),
            )
            for index, teacher in enumerate(teachers)
        }
        self._router = router
        self._options = options
        self._say = say or (lambda *_, **__: None)
        self._news = asyncio.Condition()
        self._is_over = False
        self._num_issues = 0
        self._tallies: dict[str, Tally] = {}
        self._work: dict[int, Scoring] = {}
        self.report = ServiceReport(waited_s=0.0, teachers={})

    @property
    def scoring(self) -> tuple[Scoring, ...]:
        """Leases that are being scored, in order of their start."""
        return tuple(self._work.values())

    def take_report(self) -> ServiceReport:
        """Return the work since the last call, or since `serve_while` started; its `waited_s` is 0."""
        return ServiceReport(waited_s=0.0, teachers={name: tally.take() for name, tally in self._tallies.items()})

    async def gpu_use(self) -> list[GpuUse]:
        """Return the use of each GPU of all teachers since the last call, in the order of the settings."""
        uses = await asyncio.gather(*(teacher.gpu_use() for teacher in self._teachers.values()))
        return [use for of_teacher in uses for use in of_teacher]

    async def start(self) -> None:
        """Start all teachers in parallel; if one cannot start, close all of them.

        Raises:
            TeacherError: A teacher cannot start; the message names it.
            DeadlineError: A teacher did not start in time.
        """
        error = await first_error(teacher.start() for teacher in self._teachers.values())
        if error is not None:
            with suppress(RLError):
                await self.close()
            raise error

    async def close(self) -> None:
        """Write pending scores and stop every teacher, then raise the first error."""
        await self._flush()
        error = await first_error(teacher.close() for teacher in self._teachers.values())
        if error is not None:
            raise error

    async def serve_while(self, queue: TransferQueue, work: Awaitable[Result]) -> Result:
        """Score trajectories while `work` adds them to the queue, then the remaining ones.

        If either side fails or is cancelled, the other one is cancelled, and the first error is raised.

        Args:
            queue: Queue with the task of `teacher_task`.
            work: Issues prompts, calls `issued`, and completes their sessions.

        Returns:
            The result of `work`.

        Raises:
            TeacherError: A teacher returned invalid scores, or has no replica left.
            DeadlineError: The remaining scores took too long after the last rollout.
        """
        self._is_over, self._num_issues = False, 0
        self._tallies = {name: Tally(teacher) for name, teacher in self._teachers.items()}
        rollouts: asyncio.Future[Result] = asyncio.ensure_future(work)
        serving = asyncio.create_task(self._serve(queue))
        both: set[asyncio.Future[Any]] = {rollouts, serving}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():  # it only ends on its own once the work is over
                serving.result()
            result = await rollouts
            ended = time.monotonic()
            await self._tell(is_over=True)
            await self._drain(serving)
            self.report = replace(self.take_report(), waited_s=time.monotonic() - ended)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        await asyncio.gather(*(teacher.sleep() for teacher in self._teachers.values()))
        await self._flush()
        return result

    async def issued(self) -> None:
        """Signal that prompts were issued, so that a lease may be possible."""
        await self._tell()

    # -- internal

    async def _flush(self) -> None:
        """Write pending scores to the caches."""
        for served in self._served.values():
            if served.cache is not None:
                await asyncio.to_thread(served.cache.flush)

    async def _tell(self, *, is_over: bool = False) -> None:
        async with self._news:
            self._num_issues += 1
            self._is_over = self._is_over or is_over
            self._news.notify_all()

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Wait until every group is acked."""
        await asyncio.wait({serving}, timeout=self._options.deadline_s)
        if not serving.done():
            raise DeadlineError(
                f"waited {self._options.deadline_s:g} s (distillation.deadline_s) for teachers after the last "
                f"rollout: {self._describe_work()}. Raise the deadline, or add replicas."
            )
        serving.result()

    async def _serve(self, queue: TransferQueue) -> None:
        """Wake the teachers, and score until no more groups can arrive."""
        await asyncio.gather(*(teacher.wake() for teacher in self._teachers.values()))
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._lease_all(queue, tasks)
        except BaseExceptionGroup as errors:
            first: BaseException = errors.exceptions[0]
            raise first from first.__cause__

    async def _lease_all(self, queue: TransferQueue, tasks: asyncio.TaskGroup) -> None:
        room = asyncio.Semaphore(SPARE_LEASES + sum(teacher.at_once for teacher in self._teachers.values()))
        while True:
            await room.acquire()
            seen = self._num_issues
            try:
                lease = await lease_group(
                    queue, TASK, deadline_s=self._options.deadline_s, lease_s=3 * self._options.deadline_s
                )
            except NothingToLeaseError:
                room.release()
                if self._is_over:
                    return
                await self._wait_for_news(seen)
            except DeadlineError:  # rollouts have their own deadline
                room.release()
            else:
                tasks.create_task(self._score_lease(queue, lease)).add_done_callback(lambda _: room.release())

    async def _wait_for_news(self, seen: int) -> None:
        """Wait until prompts are issued after `seen` was read, or the work is over; its runner sets the deadline."""
        async with self._news:
            await self._news.wait_for(lambda: self._num_issues > seen or self._is_over)

    async def _score_lease(self, queue: TransferQueue, lease: Lease) -> None:
        is_held = True
        try:
            columns = await self._columns(lease)
            is_held = False
            await asyncio.to_thread(queue.ack, lease, columns)
        except EngineDiedError as error:
            self._say("teacher_lease_released", prompts=[prompt.uid for prompt in lease.prompts], error=str(error))
        except OutdatedLeaseError as error:
            self._say("teacher_scores_outdated", prompts=[prompt.uid for prompt in lease.prompts], error=str(error))
        finally:
            self._work.pop(lease.lease_id, None)
            if is_held:
                queue.release(lease)

    async def _columns(self, lease: Lease) -> Mapping[str, Column]:
        """Return the score columns for all rows of a lease."""
        names = {prompt.uid: self._router.teacher_of(prompt) for prompt in lease.prompts}
        batch = lease.batch
        columns = (batch.ragged("input_ids"), batch.ragged("loss_mask"))
        rows = [TeacherRow(key=k, input_ids=i, loss_mask=m) for k, i, m in zip(batch.keys, *columns, strict=True)]
        of_rows = [names[row.key.prompt_uid] for row in rows]
        teachers = tuple(dict.fromkeys(of_rows))
        self._work[lease.lease_id] = Scoring(teachers=teachers, prompt_uid=lease.prompts[0].uid, since=time.time())
        options, scores = self._options, dict[int, TeacherScores]()
        for name in teachers:
            served, own = self._served[name], [at for at, other in enumerate(of_rows) if other == name]
            logprobs = None if served.aligner is None else batch.ragged("rollout_logprobs")
            hidden_size = served.teacher.hidden_size if options.with_hidden else None
            of_teacher = await served.scores(
                [rows[at] for at in own],
                None if logprobs is None else [logprobs[at] for at in own],
                shape=ScoreShape(top_k=options.top_k, vocab_size=options.vocab_size, hidden_size=hidden_size),
                tally=self._tallies[name],
            )
            scores |= zip(own, of_teacher, strict=True)
        return teacher_columns(
            [scores[at] for at in range(len(rows))],
            indices=[self._served[name].index for name in of_rows],
            offsets=batch.ragged("input_ids").offsets,
            hidden_size=self._widest() if options.with_hidden else None,
        )

    def _widest(self) -> int:
        sizes = [teacher.hidden_size for teacher in self._teachers.values()]
        if None in sizes:
            raise TeacherError(
                'distribution = "full" needs teachers that return hidden states; use engine = "megatron".'
            )
        return max(size for size in sizes if size is not None)

    def _describe_work(self) -> str:
        """Describe which prompts the teachers are scoring, and since when."""
        return (
            "; ".join(
                f"teacher {', '.join(map(repr, work.teachers))} has been scoring prompt {work.prompt_uid!r} since "
                f"{time.strftime('%H:%M:%S', time.localtime(work.since))}"
                for work in self._work.values()
            )
            or f"no teacher of {', '.join(map(repr, self._teachers))} is scoring, but the queue has groups left"
        )
