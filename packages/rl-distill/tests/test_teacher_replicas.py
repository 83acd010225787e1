"""Replicas of a teacher: idle ones score, dead ones restart, and each proves that it serves its model."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from distillation_fakes import FakeReplica

from rl_core.data.row_keys import RowKey
from rl_core.errors import DeadlineError, EngineDiedError, EngineError, NotReadyError, TeacherError
from rl_distill.teacher.protocol import TeacherPlan
from rl_distill.teacher.replicas import ReplicatedTeacher
from rl_distill.teacher.scores import TeacherRow

ROW = TeacherRow(
    key=RowKey("p0", 0, 0), input_ids=np.arange(5, dtype=np.int32), loss_mask=np.asarray([False] + [True] * 4)
)


def run(
    replicas: Sequence[FakeReplica], use: Callable[[ReplicatedTeacher], Awaitable[Any]], **plan: Any
) -> ReplicatedTeacher:
    """Start, use and close a teacher; replicas beyond `num_replicas` replace dead ones."""
    made = iter(replicas)
    teacher = ReplicatedTeacher(TeacherPlan(name="large", **{"deadline_s": 60, **plan}), lambda _: next(made))

    async def all_of_it() -> None:
        await teacher.start()
        try:
            await asyncio.wait_for(use(teacher), 30)
        finally:
            await teacher.close()

    asyncio.run(all_of_it())
    return teacher


def test_an_idle_replica_is_chosen_and_others_wait() -> None:
    holds = [asyncio.Event(), asyncio.Event()]
    started: list[int] = []

    def hold(index: int) -> Callable[[Sequence[TeacherRow]], Awaitable[None]]:
        async def before(rows: Sequence[TeacherRow]) -> None:
            started.append(index)
            await holds[index].wait()

        return before

    async def use(teacher: ReplicatedTeacher) -> None:
        calls = [asyncio.create_task(teacher.score([ROW])) for _ in range(3)]
        while len(started) < 2:
            await asyncio.sleep(0)
        assert sorted(started) == [0, 1]
        holds[1].set()
        while len(started) < 3:
            await asyncio.sleep(0)
        assert started[2] == 1
        holds[0].set()
        await asyncio.gather(*calls)

    teacher = run([FakeReplica(before=hold(0)), FakeReplica(before=hold(1))], use, num_replicas=2)
    assert teacher.busy_s > 0


def test_a_death_reaches_its_caller_and_the_next_caller_gets_the_next_life() -> None:
    first, second = FakeReplica(dies_at=2), FakeReplica()

    async def use(teacher: ReplicatedTeacher) -> None:
        with pytest.raises(EngineDiedError):
            await teacher.score([ROW])
        assert len(await teacher.score([ROW])) == 1

    teacher = run([first, second], use)
    assert teacher.num_restarts == 1
    assert (first.events[-1], second.scored) == ("close", [ROW.key])


def test_others_go_on_while_one_is_started_again() -> None:
    never = asyncio.Event()

    class Slow(FakeReplica):
        async def start(self) -> None:
            await never.wait()

    async def use(teacher: ReplicatedTeacher) -> None:
        with pytest.raises(EngineDiedError):
            await asyncio.gather(teacher.score([ROW]), teacher.score([ROW]))
        for _ in range(3):
            await teacher.score([ROW])

    alive = FakeReplica()
    teacher = run([FakeReplica(dies_at=2), alive, Slow()], use, num_replicas=2)
    assert len(alive.scored) == 4
    assert teacher.num_restarts == 1


def test_a_restart_that_fails_counts_and_the_last_death_is_told() -> None:
    broken = EngineError("no memory left")

    async def use(teacher: ReplicatedTeacher) -> None:
        with pytest.raises(EngineDiedError):
            await teacher.score([ROW])
        with pytest.raises(TeacherError, match=r"'large' has no replica left.*after 2 restarts: .*no memory left"):
            await teacher.score([ROW])

    run([FakeReplica(dies_at=2), *(FakeReplica(start_error=broken) for _ in range(2))], use, restarts=2)


def test_a_replica_that_forgot_its_weights_while_it_slept_is_started_anew() -> None:
    forgetful, fresh = FakeReplica(forgets_asleep=True), FakeReplica()

    async def use(teacher: ReplicatedTeacher) -> None:
        await teacher.sleep()
        await teacher.wake()
        await teacher.score([ROW])

    teacher = run([forgetful, fresh], use)
    assert (forgetful.scored, fresh.scored) == ([], [ROW.key])
    assert forgetful.events == ["start", "sleep", "wake", "close"]
    assert teacher.num_restarts == 1


def test_replicas_with_different_weights_are_refused_at_start() -> None:
    async def use(teacher: ReplicatedTeacher) -> None:
        raise AssertionError("it must not start")

    replicas = [FakeReplica(), FakeReplica(logprob=-0.7)]
    with pytest.raises(TeacherError, match="must score a short sequence after its start as before"):
        run(replicas, use, num_replicas=2)
    assert all(replica.events[-1] == "close" for replica in replicas)


def test_a_teacher_that_cannot_start_is_named_and_none_is_left() -> None:
    async def use(teacher: ReplicatedTeacher) -> None:
        raise AssertionError("it must not start")

    replicas = [FakeReplica(), FakeReplica(start_error=EngineError("no such model"))]
    with pytest.raises(TeacherError, match="teacher 'large', replica 1, could not start: no such model"):
        run(replicas, use, num_replicas=2)
    assert replicas[0].events == ["start", "close"]


@pytest.mark.parametrize(
    ("replica", "plan", "message"),
    [
        ({"most_top_k": 4}, {"top_k": 5}, "returns at most 4 most likely tokens; found distillation.top_k = 5"),
        ({}, {"with_hidden": True}, "returns no hidden states"),
    ],
)
def test_a_teacher_that_cannot_give_what_is_asked_for_is_refused(
    replica: dict[str, Any], plan: dict[str, Any], message: str
) -> None:
    async def use(teacher: ReplicatedTeacher) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(TeacherError, match=message):
        run([FakeReplica(**replica)], use, **plan)


def test_a_trajectory_longer_than_its_context_is_refused_by_name() -> None:
    async def use(teacher: ReplicatedTeacher) -> None:
        with pytest.raises(TeacherError, match=r"scores at most 4 tokens; prompt 'p0', session 0, output 0 has 5"):
            await teacher.score([ROW])

    run([FakeReplica(max_tokens=4)], use)


def test_a_replica_that_does_not_answer_is_named_with_what_it_was_asked() -> None:
    async def hold(rows: Sequence[TeacherRow]) -> None:
        await asyncio.Event().wait()

    async def use(teacher: ReplicatedTeacher) -> None:
        with pytest.raises(DeadlineError, match=r"teacher 'large': waited 0.1 s, since .*'p0'; replica 0 serves"):
            await teacher.score([ROW])

    run([FakeReplica(before=hold)], use, deadline_s=0.1)


def test_nothing_is_known_before_the_start() -> None:
    teacher = ReplicatedTeacher(TeacherPlan(name="large"), lambda _: FakeReplica())
    with pytest.raises(NotReadyError, match="'large' has not started"):
        _ = teacher.max_tokens


def test_a_teacher_that_shall_not_sleep_is_left_awake() -> None:
    replica = FakeReplica()

    async def use(teacher: ReplicatedTeacher) -> None:
        await teacher.sleep()

    run([replica], use, sleeps=False)
    assert replica.events == ["start", "close"]
