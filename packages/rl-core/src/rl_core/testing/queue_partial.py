# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of groups that are taken without the sessions that are missing, where a task allows it."""

from dataclasses import replace

from rl_core.errors import AlreadySettledError, DeadlineError
from rl_core.testing.queue_checks import (
    DEADLINE_S,
    REFERENCE,
    TRAIN,
    TRAIN_IN_ORDER,
    QueueChecks,
    put_all,
    refuses,
    uids_of,
)
from rl_core.testing.rows import make_prompts, make_trajectory

PARTIAL = replace(TRAIN, partial_after_s=10)


class PartialChecks(QueueChecks):
    """A slow session holds its group up so long, and no longer."""

    def test_a_group_is_taken_without_its_slow_sessions_in_the_end(self) -> None:
        queue = self.queue(PARTIAL)
        queue.issue(make_prompts(1), num_sessions=3)
        queue.put("p0", 2, [make_trajectory("p0", 2)])
        self.advance(queue, 9.5)
        with refuses(DeadlineError, "lacks sessions [0, 1] since 9.5 s"):
            queue.lease("train", groups=1, deadline_s=0)
        self.advance(queue, 0.5)
        lease = queue.lease("train", groups=1, deadline_s=0)
        assert lease.batch.keys == (("p0", 2, 0),)
        assert queue.stats()["sessions_left_out"] == 2
        entry = queue.ledger()[0]
        assert (entry.state, entry.sessions_settled, sorted(entry.sessions_failed)) == ("settled", 3, [0, 1])
        for session in (0, 1):
            with refuses(AlreadySettledError, f"session {session} of prompt 'p0'", "10 s after"):
                queue.put("p0", session, [make_trajectory("p0", session)])
        queue.ack(lease)
        assert queue.ledger()[0].state == "done"

    def test_a_session_in_time_is_part_of_its_group(self) -> None:
        queue = self.queue(PARTIAL)
        queue.issue(make_prompts(1), num_sessions=2)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        self.advance(queue, 9)
        queue.put("p0", 0, [make_trajectory("p0", 0)])
        self.advance(queue, 100)
        assert len(queue.lease("train", groups=1, deadline_s=0).batch) == 2
        assert queue.stats()["sessions_left_out"] == 0

    def test_a_group_without_any_row_is_not_taken(self) -> None:
        queue = self.queue(PARTIAL)
        queue.issue(make_prompts(2), num_sessions=3)
        queue.put("p1", 0, [])
        queue.fail("p1", 1, reason="engine aborted")
        self.advance(queue, 100)
        with refuses(DeadlineError, "2 issued"):
            queue.lease("train", groups=1, deadline_s=0)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p0"]
        queue.put("p1", 2, [make_trajectory("p1", 2)])
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p1"]
        assert queue.stats()["sessions_left_out"] == 2

    def test_a_waiting_consumer_is_woken_when_the_time_comes(self) -> None:
        queue = self.queue(PARTIAL)
        queue.issue(make_prompts(1), num_sessions=2)
        queue.put("p0", 0, [make_trajectory("p0", 0)])
        waiter = self.spawn(queue.lease, "train", groups=1, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        self.advance(queue, 9)
        assert not waiter.done()
        self.advance(queue, 1)
        assert uids_of(waiter.result(DEADLINE_S)) == ["p0"]

    def test_consumers_of_other_tasks_are_woken_too(self) -> None:
        queue = self.queue(REFERENCE, replace(TRAIN, partial_after_s=1000))
        queue.issue(make_prompts(1), num_sessions=2)
        queue.put("p0", 0, [make_trajectory("p0", 0)])
        reference = self.spawn(queue.lease, "reference", groups=1, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        train = self.spawn(queue.lease, "train", groups=2, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 2)
        self.advance(queue, 1000)
        assert uids_of(reference.result(DEADLINE_S)) == ["p0"]
        queue.issue(make_prompts(2)[1:], num_sessions=2)
        put_all(queue, "p1", num_sessions=2)
        assert uids_of(train.result(DEADLINE_S)) == ["p0", "p1"]

    def test_the_time_counts_from_the_last_issue(self) -> None:
        queue = self.queue(PARTIAL)
        queue.issue(make_prompts(1), num_sessions=2)
        self.advance(queue, 8)
        queue.drop("p0", reason="lost", reissue=True)
        queue.put("p0", 0, [make_trajectory("p0", 0)])
        self.advance(queue, 9)
        with refuses(DeadlineError, "lacks sessions [1]"):
            queue.lease("train", groups=1, deadline_s=0)
        self.advance(queue, 1)
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p0"]

    def test_a_claim_on_a_group_that_was_taken_is_over(self) -> None:
        queue = self.queue(PARTIAL)
        queue.issue(make_prompts(1), num_sessions=2)
        queue.claim(prompts=1, deadline_s=0)
        queue.put("p0", 0, [make_trajectory("p0", 0)])
        self.advance(queue, 10)
        queue.lease("train", groups=1, deadline_s=0)
        assert (queue.stats()["claims"], queue.unsettled()) == (0, [])

    def test_groups_in_the_order_of_issue_wait_for_one_without_rows(self) -> None:
        queue = self.queue(replace(TRAIN_IN_ORDER, partial_after_s=10))
        queue.issue(make_prompts(2), num_sessions=2)
        queue.put("p1", 0, [make_trajectory("p1", 0)])
        self.advance(queue, 10)
        with refuses(DeadlineError, "'p0' lacks sessions [0, 1]"):
            queue.lease("train", groups=1, deadline_s=0)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        assert uids_of(queue.lease("train", groups=2, deadline_s=0)) == ["p0", "p1"]
