# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Conformance checks of waiting: conditions, deadlines and wake-ups."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rl_core.errors import (
    DataError,
    DeadlineError,
    NothingToLeaseError,
    NotReadyError,
)
from rl_core.queue.client import TransferQueue
from rl_core.testing.queue_checks import (
    DEADLINE_S,
    TRAIN,
    TRAIN_IN_ORDER,
    QueueChecks,
    put_all,
    refuses,
    uids_of,
)
from rl_core.testing.rows import make_prompts, make_trajectory


class WaitChecks(QueueChecks):
    """Checks that consumers wait for groups, producers for prompts and capacity, and every wait ends."""

    def test_a_consumer_is_woken_by_the_last_session(self) -> None:
        queue = self.queue(TRAIN_IN_ORDER)
        queue.issue(make_prompts(2), num_sessions=2)
        waiter = self.spawn(queue.lease, "train", groups=2, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        put_all(queue, "p1", num_sessions=2)
        queue.put("p0", 0, [make_trajectory("p0", 0)])
        assert not waiter.done()
        queue.fail("p0", 1, reason="engine aborted")
        assert uids_of(waiter.result(DEADLINE_S)) == ["p0", "p1"]

    def test_a_consumer_is_woken_when_a_lease_runs_out(self) -> None:
        queue = self.filled(num_prompts=1)
        queue.lease("train", groups=1, deadline_s=0, lease_s=10)
        waiter = self.spawn(queue.lease, "train", groups=1, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        self.advance(queue, 9)
        assert not waiter.done()
        self.advance(queue, 1)
        assert uids_of(waiter.result(DEADLINE_S)) == ["p0"]

    def test_a_consumer_is_woken_by_a_release(self) -> None:
        queue = self.filled(num_prompts=1)
        lease = queue.lease("train", groups=1, deadline_s=0)
        waiter = self.spawn(queue.lease, "train", groups=1, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        queue.release(lease)
        assert uids_of(waiter.result(DEADLINE_S)) == ["p0"]

    def test_a_consumer_is_woken_when_nothing_more_can_come(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=1)
        waiter = self.spawn(queue.lease, "train", groups=1, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        queue.drop("p0", reason="too easy")
        with refuses(NothingToLeaseError, "1 dropped"):
            waiter.result(DEADLINE_S)

    def test_a_consumer_waits_until_all_that_it_names_are_ready(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(3), num_sessions=2)
        put_all(queue, "p0", num_sessions=2)
        waiter = self.spawn(queue.lease, "train", prompts=["p2", "p0"], deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        put_all(queue, "p1", num_sessions=2)
        queue.put("p2", 1, [make_trajectory("p2", 1)])
        assert queue.stats()["waiting/lease"] == 1
        assert uids_of(queue.lease("train", groups=1, deadline_s=0, lease_s=10)) == ["p0"]
        queue.fail("p2", 0, reason="engine aborted")
        assert queue.stats()["waiting/lease"] == 1, "another consumer has p0"
        self.advance(queue, 10)
        lease = waiter.result(DEADLINE_S)
        assert (uids_of(lease), len(lease.batch)) == (["p2", "p0"], 3)

    def test_consumers_that_wait_are_told_of_a_finish(self) -> None:
        waits: list[tuple[Callable[[TransferQueue], object], type[Exception], str]] = [
            (lambda queue: queue.lease("train", groups=2, deadline_s=DEADLINE_S), NothingToLeaseError, "1 done"),
            (
                lambda queue: queue.lease("train", prompts=["p0", "p1"], deadline_s=DEADLINE_S),
                DataError,
                "'p0' is done",
            ),
        ]
        for wait, error, words in waits:
            queue = self.queue()
            queue.issue(make_prompts(2), num_sessions=1)
            put_all(queue, "p0")
            waiter = self.spawn(wait, queue)
            self.wait_for_stat(queue, "waiting/lease", 1)
            queue.finish("train", ["p0"])
            queue.drop("p1", reason="too easy")
            with refuses(error, words):
                waiter.result(DEADLINE_S)

    def test_a_producer_waits_for_prompts_and_is_woken(self) -> None:
        queue = self.queue()
        events: list[Callable[[], object]] = [
            lambda: queue.issue(make_prompts(1), num_sessions=1),
            lambda: queue.release(claim),
            lambda: self.advance(queue, 10),
            lambda: queue.drop("p0", reason="too easy", reissue=True),
        ]
        for event in events:
            waiter = self.spawn(queue.claim, prompts=2, deadline_s=DEADLINE_S, claim_s=10)
            self.wait_for_stat(queue, "waiting/lease", 1)
            event()
            claim = waiter.result(DEADLINE_S)
            assert uids_of(claim) == ["p0"]

    def test_a_passed_deadline_says_who_waited_for_what(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=2)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        self.advance(queue, 7)
        with refuses(DeadlineError, "lease of 2 groups", "'train'", "0 ready", "2 issued", "'p0'", "[0]", "7.0 s"):
            queue.lease("train", groups=2, deadline_s=0)
        with refuses(TimeoutError, "last event: put of session 1 of prompt 'p0'"):
            queue.lease("train", groups=2, deadline_s=0.01)
        assert queue.stats()["waiting/lease"] == 0

    def test_a_producer_waits_for_capacity(self) -> None:
        queue = self.full()
        with refuses(DeadlineError, "put of 1 rows", "2 of 2 rows stored", "2 settled"):
            queue.put("p2", 0, [make_trajectory("p2", 0)], deadline_s=0)
        assert queue.ledger()[2].sessions_settled == 0
        producer = self.spawn(put_all, queue, "p2")
        self.wait_for_stat(queue, "waiting/put", 1)
        lease = queue.lease("train", groups=1, deadline_s=0)
        assert not producer.done()
        queue.ack(lease)
        producer.result(DEADLINE_S)
        assert queue.stats()["rows"] == 2

    def test_a_producer_is_woken_by_a_drop(self) -> None:
        queue = self.full()
        producer = self.spawn(put_all, queue, "p2")
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.drop("p1", reason="too easy")
        producer.result(DEADLINE_S)

    def test_a_producer_whose_prompt_is_dropped_meanwhile_is_refused(self) -> None:
        queue = self.full()
        producer = self.spawn(put_all, queue, "p2")
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.drop("p2", reason="too stale")
        queue.drop("p1", reason="too easy")
        with refuses(DataError, "'p2' is dropped", "too stale"):
            producer.result(DEADLINE_S)

    def test_close_wakes_every_waiter_and_ends_everything(self) -> None:
        queue = self.full()
        lease = queue.lease("train", groups=1, deadline_s=0)
        waiters: list[Future[Any]] = [
            self.spawn(queue.lease, "train", groups=2, deadline_s=DEADLINE_S),
            self.spawn(put_all, queue, "p2"),
        ]
        self.wait_for_stat(queue, "waiting/lease", 1)
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.close()
        for waiter in waiters:
            with refuses(NotReadyError, "closed"):
                waiter.result(DEADLINE_S)
        calls: list[Callable[[], object]] = [
            lambda: queue.issue(make_prompts(1), num_sessions=1),
            lambda: put_all(queue, "p2"),
            lambda: queue.fail("p2", 0, reason="engine aborted"),
            lambda: queue.lease("train", groups=1),
            lambda: queue.ack(lease),
        ]
        for call in calls:
            with refuses(NotReadyError, "closed"):
                call()
        queue.release(lease)
        queue.close()

    def test_every_row_reaches_one_of_many_consumers_once(self) -> None:
        num_prompts, num_sessions, seen = 60, 4, Counter[str]()
        queue = self.queue(TRAIN, capacity_rows=24)
        queue.issue(make_prompts(num_prompts), num_sessions=num_sessions)

        def produce(first: int) -> None:
            for prompt in make_prompts(num_prompts)[first::3]:
                put_all(queue, prompt.uid, num_sessions=num_sessions)

        def consume(name: str) -> None:
            for turn in range(num_prompts):
                try:
                    lease = queue.lease("train", groups=2, deadline_s=DEADLINE_S, allow_fewer=True)
                except NothingToLeaseError:
                    return
                if (turn + ord(name)) % 3 == 0:
                    queue.release(lease)
                    continue
                queue.ack(lease)
                seen.update(uids_of(lease))  # after the ack: only what counts is counted

        threads = [self.spawn(produce, first) for first in range(3)] + [self.spawn(consume, name) for name in "abc"]
        for thread in threads:
            thread.result(3 * DEADLINE_S)
        queue.forget_finished()
        while queue.ledger():  # what the last to leave had released
            lease = queue.lease("train", groups=2, deadline_s=0, allow_fewer=True)
            seen.update(uids_of(lease))
            queue.ack(lease)
            queue.forget_finished()
        assert seen == Counter({prompt.uid: 1 for prompt in make_prompts(num_prompts)})
