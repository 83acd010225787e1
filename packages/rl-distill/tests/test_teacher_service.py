"""The teachers' task in the queue: order, timing, deaths and wrong answers, without a model."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from distillation_fakes import (
    VOCAB_SIZE,
    FakeReplica,
    make_options,
    make_prompt,
    make_queue,
    make_trajectory,
    put,
    reached,
)

from rl_core import InProcessQueue
from rl_core.data.row_keys import RowKey
from rl_core.errors import DeadlineError, TeacherError
from rl_distill.teacher.protocol import TeacherPlan
from rl_distill.teacher.replicas import ReplicatedTeacher
from rl_distill.teacher.routing import TeacherRouter
from rl_distill.teacher.scores import TeacherRow, TeacherScores
from rl_distill.teacher.service import TeacherService, TeacherServiceOptions, lease_group

Work = Callable[[TeacherService], Awaitable[Any]]


def serve(
    replicas: dict[str, list[FakeReplica]],
    work: Work,
    *,
    queue: InProcessQueue,
    sources: dict[str, Sequence[str]] | None = None,
    options: TeacherServiceOptions | None = None,
    restarts: int = 3,
    **service: Any,
) -> tuple[Any, TeacherService]:
    """Start teachers, serve one step and close them; after a death, the next replica of the list takes over."""
    options = options or TeacherServiceOptions(vocab_size=VOCAB_SIZE, deadline_s=60)
    made = {name: iter(of_teacher) for name, of_teacher in replicas.items()}
    teachers = [
        ReplicatedTeacher(
            TeacherPlan(
                name=name,
                top_k=options.top_k,
                with_hidden=options.with_hidden,
                restarts=restarts,
                deadline_s=options.deadline_s,
            ),
            lambda _, name=name: next(made[name]),
        )
        for name in replicas
    ]
    router = TeacherRouter(make_options(sources or {name: [name] for name in replicas}))

    async def run() -> tuple[Any, TeacherService]:
        one = TeacherService(teachers, router, options, **service)
        await one.start()
        try:
            return await asyncio.wait_for(one.serve_while(queue, work(one)), 30), one
        finally:
            await one.close()

    return asyncio.run(run())


def test_every_trajectory_of_every_session_gets_its_teachers_scores() -> None:
    queue = make_queue()
    prompts = [make_prompt("p0", "math"), make_prompt("p1", "code")]

    async def work(service: TeacherService) -> str:
        queue.issue(prompts, num_sessions=2)
        await service.issued()
        put(queue, *(make_trajectory("p0", 0, output) for output in range(3)), make_trajectory("p0", 1))
        put(queue, make_trajectory("p1", 0), make_trajectory("p1", 1, 0, length=7), make_trajectory("p1", 1, 1))
        return "rollouts"

    math, code = FakeReplica(logprob=-0.25), FakeReplica(logprob=-0.75)
    result, service = serve({"math": [math], "code": [code]}, work, queue=queue)
    assert result == "rollouts"
    batch = queue.lease("train", groups=2, deadline_s=0).batch
    assert [tuple(key) for key in batch.keys] == [
        ("p0", 0, 0), ("p0", 0, 1), ("p0", 0, 2), ("p0", 1, 0), ("p1", 0, 0), ("p1", 1, 0), ("p1", 1, 1),
    ]  # fmt: skip
    for row, key in enumerate(batch.keys):
        mask = batch.ragged("loss_mask")[row]
        is_math = key.prompt_uid == "p0"
        expected = np.where(mask, -0.25 if is_math else -0.75, 0).astype(np.float32)
        np.testing.assert_array_equal(batch.ragged("teacher_logprobs")[row], expected[:, None])
        np.testing.assert_array_equal(
            batch.ragged("teacher_ids")[row], np.where(mask, batch.ragged("input_ids")[row], -1)[:, None]
        )
        np.testing.assert_array_equal(batch.ragged("teacher_index")[row], np.where(mask, 0 if is_math else 1, -1))
    assert service.report.teachers["math"].num_trajectories == 4
    assert service.report.teachers["code"].num_tokens == 17


def test_reports_are_taken_while_it_serves_and_each_counts_anew() -> None:
    queue = make_queue()

    async def work(service: TeacherService) -> list[int]:
        found = []
        for uid in ("p0", "p1"):
            queue.issue([make_prompt(uid, "math")], num_sessions=1)
            await service.issued()
            put(queue, make_trajectory(uid, 0))
            lease = await asyncio.to_thread(queue.lease, "train", prompts=[uid], deadline_s=60)
            queue.ack(lease)
            found.append(service.take_report().teachers["math"].num_trajectories)
        found.append(service.take_report().teachers["math"].num_trajectories)
        assert service.scoring == ()
        return found

    found, _ = serve({"math": [FakeReplica()]}, work, queue=queue)
    assert found == [1, 1, 0]


def test_a_group_is_scored_while_others_still_generate() -> None:
    queue, scored = make_queue(), asyncio.Event()

    async def note(rows: Sequence[TeacherRow]) -> None:
        assert rows[0].key.prompt_uid == "p1"
        scored.set()

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0"), make_prompt("p1")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p1", 0))
        await reached(scored)  # p0 has no session yet
        queue.fail("p0", 0, reason="nothing came")

    serve({"default": [FakeReplica(before=note)]}, work, queue=queue)
    assert scored.is_set()
    assert len(queue.lease("train", groups=1, deadline_s=0).batch) == 1


def test_prompts_issued_after_all_others_were_scored_are_scored_too() -> None:
    queue = make_queue()
    replica = FakeReplica()

    async def work(service: TeacherService) -> None:
        await asyncio.sleep(0)  # no prompt was issued yet
        for round_ in range(3):
            queue.issue([make_prompt(f"p{round_}")], num_sessions=1)
            await service.issued()
            put(queue, make_trajectory(f"p{round_}", 0))
            async with asyncio.timeout(30):
                while len(replica.scored) <= round_:
                    await asyncio.sleep(0.001)

    serve({"default": [replica]}, work, queue=queue)
    assert [key.prompt_uid for key in replica.scored] == ["p0", "p1", "p2"]
    assert len(queue.lease("train", groups=3, deadline_s=0).batch) == 3


def test_a_dead_teachers_group_is_delivered_again_and_scored_by_the_next() -> None:
    queue, said = make_queue(), []
    first, second = FakeReplica(dies_at=4), FakeReplica()  # dies after the proofs at start and wake, at p0

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0"), make_prompt("p1")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p0", 0))
        put(queue, make_trajectory("p1", 0))

    _, service = serve(
        {"default": [first, second]}, work, queue=queue, say=lambda event, **fields: said.append((event, fields))
    )
    assert [key.prompt_uid for key in first.scored] == ["p0"]
    assert [key.prompt_uid for key in second.scored] == ["p1"]
    assert "close" in first.events
    assert service.report.teachers["default"].num_restarts == 1
    assert [(event, fields["prompts"]) for event, fields in said] == [("teacher_lease_released", ["p1"])]
    assert "killed by signal 9" in said[0][1]["error"]
    batch = queue.lease("train", groups=2, deadline_s=0).batch
    assert (batch.ragged("teacher_index").values == 0).sum() == 6, "each trained token has a teacher"


def test_the_run_ends_with_the_teachers_name_when_no_restart_is_left() -> None:
    queue = make_queue()

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p0", 0))
        await asyncio.Event().wait()

    dying = [FakeReplica(dies_at=3), FakeReplica(dies_at=2)]
    with pytest.raises(TeacherError, match=r"'default' has no replica left.*replica 0, after 1 restarts: .*signal 9"):
        serve({"default": dying}, work, queue=queue, restarts=1)
    assert queue.stats()["groups/settled"] == 1, "the lease was given back"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, token_ids=s.token_ids + 1), r"the token's own id first.*scored other token ids"),
        (lambda s: replace(s, logprobs=np.full_like(s.logprobs, np.nan)), r"finite logprobs; found \[nan\]"),
        (lambda s: replace(s, logprobs=np.full_like(s.logprobs, 0.1)), "logprobs <= 0"),
        (lambda s: replace(s, logprobs=s.logprobs[1:]), r"shape \[5, 1\].*found \[4, 1\]"),
    ],
)
def test_wrong_answers_end_the_step_and_name_teacher_and_trajectory(
    change: Callable[[TeacherScores], TeacherScores], message: str
) -> None:
    queue = make_queue()

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p0", 0, 0), make_trajectory("p0", 0, 1))
        await asyncio.Event().wait()

    replica = FakeReplica(change=lambda row, scores: change(scores) if row.key.output_index == 1 else scores)
    with pytest.raises(TeacherError, match=rf"(?s)teacher 'default' on prompt 'p0', session 0, output 1.*{message}"):
        serve({"default": [replica]}, work, queue=queue)


def test_an_error_of_the_rollouts_ends_the_service_and_is_raised_whole() -> None:
    queue = make_queue()

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0"), make_prompt("p1")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p0", 0))
        raise ValueError("no rollouts today")

    with pytest.raises(ValueError, match="no rollouts today"):
        serve({"default": [FakeReplica()]}, work, queue=queue)


def test_cancelling_gives_the_lease_back() -> None:
    queue, held, cancelled = make_queue(), asyncio.Event(), []

    async def hold(rows: Sequence[TeacherRow]) -> None:
        held.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(rows[0].key)
            raise

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p0", 0))
        await reached(held)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve({"default": [FakeReplica(before=hold)]}, work, queue=queue)
    assert cancelled == [RowKey("p0", 0, 0)]
    assert len(queue.lease("teacher", groups=1, deadline_s=60).batch) == 1


def test_teachers_that_take_too_long_after_the_last_rollout_are_named() -> None:
    queue = make_queue()

    async def hold(rows: Sequence[TeacherRow]) -> None:
        await asyncio.Event().wait()

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p0", 0))

    options = TeacherServiceOptions(vocab_size=VOCAB_SIZE, deadline_s=0.2)
    with pytest.raises(DeadlineError, match=r"teacher 'default'(: waited 0.2 s.*| has been scoring )prompt 'p0'"):
        serve({"default": [FakeReplica(before=hold)]}, work, queue=queue, options=options)


def test_teachers_wake_before_and_sleep_after() -> None:
    queue, replica = make_queue(), FakeReplica()

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p0", 0))

    serve({"default": [replica]}, work, queue=queue)
    assert replica.events == ["start", "wake", "sleep", "close"]
    assert replica.num_calls == 3, "a proof at the start, one after waking, and one group"


def test_rows_of_which_nothing_trains_are_masked_and_asked_of_nobody() -> None:
    queue, replica = make_queue(), FakeReplica()

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0")], num_sessions=2)
        await service.issued()
        silent = make_trajectory("p0", 0)
        none = np.zeros(5, dtype=bool)
        put(
            queue,
            replace(
                silent,
                loss_mask=none,
                rollout_logprobs=np.zeros(5, np.float32),
                policy_versions=np.full(5, -1, np.int32),
            ),
            make_trajectory("p0", 1),
        )

    serve({"default": [replica]}, work, queue=queue)
    assert replica.scored == [RowKey("p0", 1, 0)]
    batch = queue.lease("train", groups=1, deadline_s=0).batch
    assert (batch.ragged("teacher_ids")[0] == -1).all()


def test_stored_scores_are_taken_and_checked_and_new_ones_are_stored() -> None:
    queue, replica = make_queue(), FakeReplica(logprob=-0.5)
    stored: dict[RowKey, TeacherScores] = {}
    flushed: list[int] = []

    class Cache:
        def lookup(self, rows: Sequence[TeacherRow]) -> list[TeacherScores | None]:
            return [stored.get(row.key) for row in rows]

        def store(self, rows: Sequence[TeacherRow], scores: Sequence[TeacherScores]) -> None:
            stored.update({row.key: one for row, one in zip(rows, scores, strict=True)})

        def flush(self) -> None:
            flushed.append(len(stored))

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0")], num_sessions=2)
        await service.issued()
        put(queue, make_trajectory("p0", 0), make_trajectory("p0", 1))

    one = make_trajectory("p0", 0)
    values = np.where(one.loss_mask, -0.125, 0).astype(np.float32)[:, None]
    ids = np.where(one.loss_mask, one.input_ids, -1).astype(np.int32)[:, None]
    stored[RowKey("p0", 0, 0)] = TeacherScores(logprobs=values, token_ids=ids)
    _, service = serve({"default": [replica]}, work, queue=queue, caches={"default": Cache()})
    assert replica.scored == [RowKey("p0", 1, 0)]
    assert set(stored) == {RowKey("p0", 0, 0), RowKey("p0", 1, 0)}
    report = service.report.teachers["default"]
    assert (report.num_stored, report.num_trajectories) == (1, 1)
    assert flushed == [2, 2], "what is new is written after the step, and in the end"
    batch = queue.lease("train", groups=1, deadline_s=0).batch
    assert batch.ragged("teacher_logprobs")[0][2:].tolist() == [[-0.125]] * 3


def test_hidden_states_are_padded_to_the_widest_teacher() -> None:
    queue = make_queue(with_hidden=True)

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0", "a"), make_prompt("p1", "b")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p0", 0))
        put(queue, make_trajectory("p1", 0))

    options = TeacherServiceOptions(vocab_size=VOCAB_SIZE, with_hidden=True, deadline_s=60)
    replicas = {"a": [FakeReplica(hidden_size=2)], "b": [FakeReplica(hidden_size=3)]}
    serve(replicas, work, queue=queue, options=options)
    hidden = queue.lease("train", groups=2, deadline_s=0).batch.ragged("teacher_hidden")
    assert hidden[0].tolist() == [[0, 0, 0]] * 2 + [[1, 1, 0]] * 3
    assert hidden[1].tolist() == [[0, 0, 0]] * 2 + [[1, 1, 1]] * 3


def test_a_lease_that_comes_after_its_waiter_was_cancelled_is_given_back() -> None:
    queue = make_queue()
    queue.issue([make_prompt("p0")], num_sessions=1)

    async def run() -> None:
        waiting = asyncio.create_task(lease_group(queue, "teacher", deadline_s=60, lease_s=60))
        async with asyncio.timeout(30):
            while not queue.stats()["waiting/lease"]:
                await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        put(queue, make_trajectory("p0", 0))
        lease = await lease_group(queue, "teacher", deadline_s=60, lease_s=60)
        assert [prompt.uid for prompt in lease.prompts] == ["p0"]

    asyncio.run(run())


def test_a_group_that_was_dropped_while_it_was_scored_is_no_error() -> None:
    queue, said = make_queue(), []

    async def drop(rows: Sequence[TeacherRow]) -> None:
        if rows[0].key.prompt_uid == "p0":
            queue.drop("p0", reason="stale")

    async def work(service: TeacherService) -> None:
        queue.issue([make_prompt("p0"), make_prompt("p1")], num_sessions=1)
        await service.issued()
        put(queue, make_trajectory("p0", 0))
        put(queue, make_trajectory("p1", 0))

    serve({"default": [FakeReplica(before=drop)]}, work, queue=queue, say=lambda event, **_: said.append(event))
    assert said == ["teacher_scores_outdated"]
    assert [prompt.uid for prompt in queue.lease("train", groups=1, deadline_s=0).prompts] == ["p1"]
