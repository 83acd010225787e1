"""Checks of capacity in rows and bytes: which puts wait, and that none waits for ever."""

from queue_conformance.tools import batch_of
from rl_core.errors import DataError, DeadlineError
from rl_core.queue.client import TransferQueue
from rl_core.queue.interface import TaskSpec
from rl_core.testing.fixtures import make_prompts, make_trajectory, ragged_like
from rl_core.testing.queue_checks import DEADLINE_S, REFERENCE, TRAIN, QueueChecks, put_all, refuses, uids_of


class CapacityChecks(QueueChecks):
    """A put waits while the queue is full, unless it would wait for ever."""

    def bounded(self, *tasks: TaskSpec, num_groups: float, num_prompts: int = 4) -> TransferQueue:
        """Return a queue with capacity for a number of one-row groups; it contains two."""
        one = self.filled(num_prompts=1).stats()["size_bytes"]
        queue = self.queue(*tasks, capacity_bytes=int(one * num_groups))
        queue.issue(make_prompts(num_prompts), num_sessions=1)
        for uid in ("p0", "p1"):
            put_all(queue, uid)
        return queue

    def test_a_producer_waits_for_bytes(self) -> None:
        queue = self.bounded(num_groups=2.5)
        held = int(queue.stats()["size_bytes"])
        with refuses(DeadlineError, "put of 1 rows", f"{held} of {int(held * 1.25)} bytes"):
            queue.put("p2", 0, [make_trajectory("p2", 0)], deadline_s=0)
        producer = self.spawn(put_all, queue, "p2")
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        producer.result(DEADLINE_S)
        assert queue.stats()["size_bytes"] == held

    def test_columns_that_tasks_give_count_and_never_wait(self) -> None:
        queue = self.bounded(REFERENCE, TRAIN, num_groups=3)
        before = queue.stats()["size_bytes"]
        lease = queue.lease("reference", groups=2, deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])})
        assert queue.stats()["size_bytes"] >= before + 2 * 5 * 4
        with refuses(DeadlineError, "bytes"):
            queue.put("p2", 0, [make_trajectory("p2", 0)], deadline_s=0)
        queue.ack(queue.lease("train", groups=2, deadline_s=0))
        assert queue.stats()["size_bytes"] == 0
        put_all(queue, "p2")

    def test_a_row_larger_than_the_queue_gets_through(self) -> None:
        queue = self.queue(TRAIN, capacity_bytes=1)
        queue.issue(make_prompts(2), num_sessions=1)
        put_all(queue, "p0")
        with refuses(DeadlineError, "of 1 bytes"):
            queue.put("p1", 0, [make_trajectory("p1", 0)], deadline_s=0)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        put_all(queue, "p1")
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p1"]

    def test_a_batch_waits_as_a_whole(self) -> None:
        queue = self.queue(TRAIN, capacity_rows=3)
        queue.issue(make_prompts(4), num_sessions=1)
        queue.put_batch(batch_of(("p0", 0, 0), ("p1", 0, 0)))
        more = batch_of(("p2", 0, 0), ("p3", 0, 0))
        with refuses(DeadlineError, "put of 2 rows", "2 of 3 rows stored"):
            queue.put_batch(more, deadline_s=0)
        assert [entry.sessions_settled for entry in queue.ledger()] == [1, 1, 0, 0]
        producer = self.spawn(queue.put_batch, more, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        producer.result(DEADLINE_S)
        assert uids_of(queue.lease("train", groups=3, deadline_s=0)) == ["p1", "p2", "p3"]

    def test_a_wrong_put_does_not_wait_to_be_refused(self) -> None:
        queue = self.full()
        with refuses(DataError, "'p9'", "never issued"):
            queue.put("p9", 0, [make_trajectory("p9", 0)], deadline_s=0)
        with refuses(DataError, "already settled"):
            queue.put("p0", 0, [make_trajectory("p0", 0)], deadline_s=0)

    def test_a_group_larger_than_the_queue_is_finished_when_none_can_be_consumed(self) -> None:
        queue = self.queue(TRAIN, capacity_rows=2)
        queue.issue(make_prompts(1), num_sessions=3)
        put_all(queue, "p0", num_sessions=3)
        assert len(queue.lease("train", groups=1, deadline_s=0).batch) == 3

    def test_a_full_queue_and_a_consumer_that_wants_more_do_not_wait_for_each_other(self) -> None:
        queue = self.full()
        producer = self.spawn(put_all, queue, "p2")
        self.wait_for_stat(queue, "waiting/put", 1)
        lease = queue.lease("train", groups=3, deadline_s=DEADLINE_S)
        producer.result(DEADLINE_S)
        assert uids_of(lease) == ["p0", "p1", "p2"]

    def test_a_full_queue_lets_in_what_a_consumer_waits_for_by_name(self) -> None:
        queue = self.full()
        with refuses(DeadlineError, "2 of 2 rows stored"):
            queue.put("p2", 0, [make_trajectory("p2", 0)], deadline_s=0)
        waiter = self.spawn(queue.lease, "train", prompts=["p2"], deadline_s=DEADLINE_S)
        put_all(queue, "p2")
        assert uids_of(waiter.result(DEADLINE_S)) == ["p2"]

    def test_a_producer_waits_while_a_consumer_works_though_another_wants_more(self) -> None:
        queue = self.full(num_prompts=4)
        working = queue.lease("train", groups=1, deadline_s=0)
        wanting = self.spawn(queue.lease, "train", groups=2, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        with refuses(DeadlineError, "2 of 2 rows stored"):
            queue.put("p2", 0, [make_trajectory("p2", 0)], deadline_s=0)
        queue.ack(working)
        put_all(queue, "p2")
        assert uids_of(wanting.result(DEADLINE_S)) == ["p1", "p2"]

    def test_a_producer_is_woken_by_a_finish_and_not_by_a_release(self) -> None:
        queue = self.full()
        producer = self.spawn(put_all, queue, "p2")
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.release(queue.lease("train", groups=2, deadline_s=0))
        assert queue.stats()["waiting/put"] == 1
        queue.finish("train", ["p1"])
        producer.result(DEADLINE_S)
