"""Checks of leases: which consumer has which groups, and for how long."""

from rl_core.errors import DataError, DeadlineError, NothingToLeaseError, OutdatedLeaseError
from rl_core.testing.fixtures import make_prompts, ragged_like
from rl_core.testing.queue_checks import REFERENCE, TRAIN, TRAIN_IN_ORDER, QueueChecks, put_all, refuses, uids_of


class LeaseChecks(QueueChecks):
    """Groups are delivered in the task's order, to one consumer of a task at a time, until they are acked."""

    def test_groups_come_as_they_arrive(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(4), num_sessions=1)
        for uid in ("p3", "p1", "p2"):
            put_all(queue, uid)
        lease = queue.lease("train", groups=2, deadline_s=0)
        assert uids_of(lease) == ["p3", "p1"]
        put_all(queue, "p0")
        queue.release(lease)
        assert uids_of(queue.lease("train", groups=3, deadline_s=0)) == ["p3", "p1", "p2"]
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p0"]

    def test_groups_come_strictly_in_the_order_of_issue_when_asked(self) -> None:
        queue = self.queue(TRAIN_IN_ORDER)
        queue.issue(make_prompts(5), num_sessions=1)
        for uid in ("p3", "p1", "p2"):
            put_all(queue, uid)
        with refuses(DeadlineError, "3 ready", "'p0' has lacked sessions [0]"):
            queue.lease("train", groups=1, deadline_s=0)
        put_all(queue, "p0")
        lease = queue.lease("train", groups=2, deadline_s=0)
        assert uids_of(lease) == ["p0", "p1"]
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p2"]
        queue.release(lease)
        assert uids_of(queue.lease("train", groups=3, deadline_s=0)) == ["p0", "p1", "p3"]
        queue.drop("p4", reason="too easy")
        with refuses(DeadlineError, "0 ready"):
            queue.lease("train", groups=1, deadline_s=0)

    def test_a_leased_group_is_not_delivered_twice(self) -> None:
        queue = self.filled(num_prompts=3)
        first, second = (queue.lease("train", groups=1, deadline_s=0) for _ in range(2))
        assert (uids_of(first), uids_of(second)) == (["p0"], ["p1"])
        assert first.lease_id != second.lease_id
        with refuses(DeadlineError, "1 ready", "2 leased"):
            queue.lease("train", groups=2, deadline_s=0)

    def test_each_task_has_its_own_leases_and_a_group_is_done_after_all(self) -> None:
        queue = self.filled(REFERENCE, TRAIN, num_prompts=1)
        train, reference = (queue.lease(task, groups=1, deadline_s=0) for task in ("train", "reference"))
        queue.ack(train)
        assert queue.ledger()[0].state == "settled"
        assert queue.stats()["rows"] == 1
        queue.ack(reference, {"reference_logprobs": ragged_like(reference.batch, "reference_logprobs", [-1.0])})
        assert queue.ledger()[0].state == "done"
        assert queue.ledger()[0].acked_by == {"train", "reference"}
        assert (queue.stats()["rows"], queue.stats()["size_bytes"]) == (0, 0)

    def test_an_ack_in_time_counts_after_the_lease_would_have_run_out(self) -> None:
        queue = self.filled(num_prompts=1)
        lease = queue.lease("train", groups=1, deadline_s=0, lease_s=10)
        self.advance(queue, 9.5)
        queue.ack(lease)
        self.advance(queue, 100)
        assert queue.ledger()[0].state == "done"
        with refuses(OutdatedLeaseError, "was acked"):
            queue.ack(lease)

    def test_a_lease_may_be_cut_short(self) -> None:
        queue = self.filled(num_prompts=1)
        lease = queue.extend(queue.lease("train", groups=1, deadline_s=0, lease_s=1000), lease_s=1)
        self.advance(queue, 1)
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p0"]
        with refuses(OutdatedLeaseError):
            queue.extend(lease, lease_s=10)

    def test_released_groups_are_delivered_again(self) -> None:
        queue = self.filled(num_prompts=2)
        lease = queue.lease("train", groups=2, deadline_s=0)
        queue.release(lease)
        queue.release(lease)
        with refuses(OutdatedLeaseError, "was released"):
            queue.ack(lease)
        assert uids_of(queue.lease("train", groups=2, deadline_s=0)) == ["p0", "p1"]

    def test_a_prompt_that_one_task_has_acked_may_be_dropped(self) -> None:
        queue = self.filled(REFERENCE, TRAIN, num_prompts=1)
        lease = queue.lease("reference", groups=1, deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0])})
        queue.drop("p0", reason="too stale")
        assert (queue.ledger()[0].state, queue.stats()["rows"]) == ("dropped", 0)
        with refuses(NothingToLeaseError, "1 dropped"):
            queue.lease("train", groups=1, deadline_s=0)

    def test_fewer_groups_only_once_no_more_can_come(self) -> None:
        queue = self.filled(num_prompts=1)
        queue.issue(make_prompts(3)[1:], num_sessions=1)
        with refuses(DeadlineError, "2 issued"):
            queue.lease("train", groups=5, deadline_s=0, allow_fewer=True)
        put_all(queue, "p1")
        queue.fail("p2", 0, reason="engine aborted")
        with refuses(DeadlineError, "2 ready"):
            queue.lease("train", groups=5, deadline_s=0)
        assert uids_of(queue.lease("train", groups=5, deadline_s=0, allow_fewer=True)) == ["p0", "p1"]

    def test_fewer_groups_wait_for_those_that_another_consumer_has(self) -> None:
        queue = self.filled(num_prompts=2)
        lease = queue.lease("train", groups=1, deadline_s=0)
        with refuses(DeadlineError, "1 ready", "1 leased"):
            queue.lease("train", groups=2, deadline_s=0, allow_fewer=True)
        queue.ack(lease)
        assert uids_of(queue.lease("train", groups=2, deadline_s=0, allow_fewer=True)) == ["p1"]

    def test_nothing_to_lease_is_said_at_once(self) -> None:
        queue = self.filled(num_prompts=2)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        queue.drop("p1", reason="too easy")
        with refuses(NothingToLeaseError, "'train'", "3 groups", "1 done", "1 dropped"):
            queue.lease("train", groups=3, deadline_s=0)
        with refuses(NothingToLeaseError, "1 settled"):
            queue = self.filled(REFERENCE, TRAIN, num_prompts=1)
            queue.ack(queue.lease("train", groups=1, deadline_s=0))
            queue.lease("train", groups=1, deadline_s=0)
        with refuses(NothingToLeaseError, "nothing issued"):
            self.queue().lease("train", groups=1, deadline_s=0)

    def test_impossible_requests_are_refused(self) -> None:
        queue = self.filled(num_prompts=1)
        with refuses(DataError, "'tarin'", "['train']"):
            queue.lease("tarin", groups=1)
        with refuses(DataError, "at least 1 group", "found 0"):
            queue.lease("train", groups=0)
        with refuses(DataError, "groups or prompts", "groups=None"):
            queue.lease("train")
