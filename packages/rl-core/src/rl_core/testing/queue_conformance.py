# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Conformance suite for backends of the transfer queue."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from rl_core.data.batch import Batch
from rl_core.errors import (
    AlreadySettledError,
    DataError,
    DeadlineError,
    NothingToLeaseError,
    NotReadyError,
    OutdatedLeaseError,
)
from rl_core.queue.interface import TaskSpec
from rl_core.testing.fixtures import make_prompts, make_trajectory, ragged_like
from rl_core.testing.queue_checks import (
    DEADLINE_S,
    LARGE,
    REFERENCE,
    TRAIN,
    TRAIN_IN_ORDER,
    QueueChecks,
    put_all,
    put_large,
    refuses,
    states_of,
    uids_of,
)


class QueueBackendConformance(QueueChecks):
    """Tests the parts that differ between backends, which share the queue's client and service.

    These are the transport of requests, errors and rows, and the waking of waiters. pytest runs the suite for each
    subclass that defines `make_queue`. The backend must read lease times from the given `clock`, and read it in
    `stats`.

        class TestInProcessQueue(QueueBackendConformance):
            def make_queue(self, tasks, *, options, clock):
                return InProcessQueue(tasks, options=options, clock=clock)
    """

    # -- requests and errors

    def test_every_request_reaches_the_queue(self) -> None:
        queue = self.queue(REFERENCE, TRAIN)
        queue.issue(make_prompts(3), num_sessions=2)
        claim = queue.extend(queue.claim(prompts=2, deadline_s=0), lease_s=10)
        assert (uids_of(claim), claim.sessions, claim.expires_at) == (["p0", "p1"], ((0, 1),) * 2, self.clock() + 10)
        put_all(queue, "p0", num_sessions=2)
        queue.fail("p1", 0, reason="engine aborted")
        queue.release(claim)
        assert [(one.prompt.uid, one.sessions) for one in queue.unsettled()] == [("p1", (1,)), ("p2", (0, 1))]
        lease = queue.lease("reference", groups=1, deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])})
        queue.finish("train", ["p0"])
        queue.drop("p1", reason="lost", reissue=True)
        queue.drop("p2", reason="too easy")
        queue.set_policy_version(3)
        assert [(entry.state, entry.attempt, entry.reason) for entry in queue.ledger()] == [
            ("done", 1, None),
            ("issued", 2, "lost"),
            ("dropped", 1, "too easy"),
        ]
        assert (queue.stats()["acks/train"], queue.forget_finished(), states_of(queue)) == (1, 2, ["issued"])

    def test_errors_keep_their_type_and_message(self) -> None:
        queue = self.filled(num_prompts=1)
        with refuses(AlreadySettledError, "session 0 of prompt 'p0' is already settled"):
            put_all(queue, "p0")
        with refuses(DataError, "'p9' was never issued"):
            queue.fail("p9", 0, reason="engine aborted")
        lease = queue.lease("train", groups=1, deadline_s=0, lease_s=10)
        self.advance(queue, 10)
        with refuses(OutdatedLeaseError, f"lease {lease.lease_id}", "'train'", "expired"):
            queue.ack(lease)

    # -- rows

    def test_rows_come_out_as_they_went_in(self) -> None:
        queue = self.queue(TRAIN_IN_ORDER)
        queue.issue(make_prompts(2), num_sessions=2)
        for uid, session in [("p1", 1), ("p0", 1), ("p1", 0), ("p0", 0)]:
            queue.put(uid, session, [make_trajectory(uid, session, reward=10.0 * session, extras={"from": uid})])
        lease = queue.lease("train", groups=2, deadline_s=0)
        assert uids_of(lease) == ["p0", "p1"]
        assert lease.batch.keys == (("p0", 0, 0), ("p0", 1, 0), ("p1", 0, 0), ("p1", 1, 0))
        assert [row.tolist() for row in lease.batch.ragged("input_ids")] == [[1, 2, 0, 0, 0], [1, 2, 1, 0, 0]] * 2
        assert lease.batch.dense("reward").tolist() == [0.0, 10.0, 0.0, 10.0]
        assert [extras["from"] for extras in lease.batch.extras] == ["p0", "p0", "p1", "p1"]
        queue.ack(lease)
        assert [entry.state for entry in queue.ledger()] == ["done", "done"]

    def test_a_session_may_give_several_rows_or_none(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=3)
        queue.put("p0", 2, [make_trajectory("p0", 2, output) for output in (1, 0)])
        queue.put("p0", 0, [])
        queue.put("p0", 1, [make_trajectory("p0", 1, num_response_tokens=7)])
        lease = queue.lease("train", groups=1, deadline_s=0)
        assert lease.batch.keys == (("p0", 1, 0), ("p0", 2, 0), ("p0", 2, 1))
        assert lease.batch.ragged("input_ids").lengths.tolist() == [9, 5, 5]

    def test_a_batch_of_a_thousand_rows_comes_out_as_it_went_in(self) -> None:
        num_prompts, num_sessions = 125, 8
        queue = self.queue()
        queue.issue(make_prompts(num_prompts), num_sessions=num_sessions)
        keys = [(f"p{p}", session, 0) for p in range(num_prompts) for session in range(num_sessions)]
        rows = [make_trajectory(*key, num_response_tokens=1 + i % 7, reward=float(i)) for i, key in enumerate(keys)]
        order = np.random.default_rng(0).permutation(len(rows))
        queue.put_batch(Batch.from_trajectories([rows[i] for i in order]), deadline_s=DEADLINE_S)
        lease = queue.lease("train", groups=num_prompts, deadline_s=DEADLINE_S)
        found = dict(zip(map(tuple, lease.batch.keys), lease.batch.dense("reward").tolist(), strict=True))
        assert found == {key: float(i) for i, key in enumerate(keys)}
        queue.ack(lease)
        assert queue.stats()["groups/done"] == num_prompts

    def test_large_rows_come_out_as_they_went_in(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(3), num_sessions=2)
        for uid, session in [("p1", 1), ("p0", 0), ("p1", 0), ("p0", 1)]:
            put_large(queue, uid, session)
        rows = [make_trajectory("p2", session, num_response_tokens=LARGE) for session in (1, 0)]
        queue.put_batch(Batch.from_trajectories(rows))
        lease = queue.lease("train", groups=3, deadline_s=0)
        assert uids_of(lease) == ["p1", "p0", "p2"]
        ids = lease.batch.ragged("input_ids")
        assert ids.lengths.tolist() == [LARGE + 2] * 6
        assert [int(row[-1]) for row in ids] == [1, 1, 0, 0, 0, 0]
        assert [int(row[2]) for row in ids] == [1, 1, 0, 0, 0, 1]
        assert (lease.batch.ragged("rollout_logprobs").values == np.float32(-0.5)).sum() == 6 * LARGE
        queue.ack(lease)
        assert queue.stats()["size_bytes"] == 0

    def test_rows_that_are_looked_at_stay_while_others_come_and_go(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(8), num_sessions=1)
        held = []
        for index in range(8):
            put_large(queue, f"p{index}")
            lease = queue.lease("train", groups=1, deadline_s=0)
            held.append(lease.batch.ragged("input_ids")[0])
            queue.ack(lease)
            del lease
            if index % 3 == 2:
                held[index - 1] = held[index - 1].copy()  # lets go of the row itself
        assert [(int(row.min()), int(row.max())) for row in held] == [(index, index) for index in range(8)]

    def test_large_columns_that_tasks_give_reach_others(self) -> None:
        train = TaskSpec(name="train", needs=frozenset({"reference_logprobs"}))
        queue = self.queue(REFERENCE, train)
        queue.issue(make_prompts(3), num_sessions=1)
        for index in range(3):
            put_large(queue, f"p{index}")
        for portion in (2, 1):
            lease = queue.lease("reference", groups=portion, deadline_s=0)
            values = [-1.0 - int(uid[1:]) for uid in uids_of(lease)]
            queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", values)})
        batch = queue.lease("train", groups=3, deadline_s=0).batch
        assert [(float(row.min()), float(row.max())) for row in batch.ragged("reference_logprobs")] == [
            (-1.0, -1.0),
            (-2.0, -2.0),
            (-3.0, -3.0),
        ]

    def test_what_is_refused_keeps_no_capacity(self) -> None:
        queue = self.queue(REFERENCE, TRAIN)
        queue.issue(make_prompts(1), num_sessions=1)
        put_large(queue, "p0")
        with refuses(DataError, "already settled"):
            put_large(queue, "p0")
        lease = queue.lease("reference", groups=1, deadline_s=0, lease_s=10)
        given = {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0])}
        held = queue.stats()["size_bytes"]
        self.advance(queue, 11)
        for _ in range(2):
            with refuses(OutdatedLeaseError, f"lease {lease.lease_id}"):
                queue.ack(lease, given)
        stats = queue.stats()
        assert (stats["size_bytes"], stats["rows/reserved"], stats["size_bytes/reserved"]) == (held, 0, 0)

    # -- waits

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
