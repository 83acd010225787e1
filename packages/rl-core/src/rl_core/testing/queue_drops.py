# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of prompts that are issued again, and of what is listed as not yet there."""

from rl_core.errors import NothingToLeaseError, OutdatedLeaseError
from rl_core.row_keys import RowKey
from rl_core.testing.queue_checks import REFERENCE, TRAIN, QueueChecks, put_all, refuses, uids_of
from rl_core.testing.rows import make_prompts, make_trajectory, ragged_like


class DropChecks(QueueChecks):
    """A prompt that is issued again starts anew; what belongs to its last attempt counts no longer."""

    def test_a_prompt_is_issued_again_with_an_attempt_more(self) -> None:
        queue = self.filled(num_prompts=2, num_sessions=2)
        for attempt in (2, 3):
            queue.drop("p0", reason="sandbox broke: disk", reissue=True)
            entry = queue.ledger()[0]
            assert (entry.state, entry.attempt, entry.reason) == ("issued", attempt, "sandbox broke: disk")
            assert (entry.sessions_settled, entry.num_rows, entry.num_tokens) == (0, 0, 0)
        assert (queue.stats()["reissued"], queue.stats()["drops/sandbox broke"], queue.stats()["rows"]) == (2, 2, 2)
        for session in range(2):
            queue.put("p0", session, [make_trajectory("p0", session, num_response_tokens=7)])
        lease = queue.lease("train", groups=2, deadline_s=0)
        lengths = dict(zip(lease.batch.keys, lease.batch.ragged("input_ids").lengths.tolist(), strict=True))
        assert [lengths[RowKey("p0", session, 0)] for session in range(2)] == [9, 9]
        queue.ack(lease)
        assert [(entry.state, entry.attempt) for entry in queue.ledger()] == [("done", 3), ("done", 1)]

    def test_failed_sessions_of_the_last_attempt_are_open_again(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=2)
        queue.fail("p0", 0, reason="engine aborted")
        queue.drop("p0", reason="engine broke", reissue=True)
        assert queue.unsettled()[0].sessions == (0, 1)
        put_all(queue, "p0", num_sessions=2)
        assert queue.ledger()[0].sessions_failed == {}

    def test_acks_of_the_last_attempt_are_outdated(self) -> None:
        queue = self.filled(num_prompts=2)
        lease = queue.lease("train", groups=2, deadline_s=0)
        queue.drop("p0", reason="too easy", reissue=True)
        put_all(queue, "p0")
        with refuses(OutdatedLeaseError, f"lease {lease.lease_id}", "'p0' was dropped: too easy"):
            queue.ack(lease)
        queue.release(lease)
        again = queue.lease("train", groups=2, deadline_s=0)
        assert sorted(uids_of(again)) == ["p0", "p1"]
        queue.ack(again)
        assert [entry.state for entry in queue.ledger()] == ["done", "done"]

    def test_a_prompt_that_was_issued_again_arrives_anew(self) -> None:
        queue = self.filled(num_prompts=3)
        queue.drop("p0", reason="too easy", reissue=True)
        put_all(queue, "p0")
        queue.drop("p1", reason="too easy", reissue=True)
        put_all(queue, "p1")
        assert uids_of(queue.lease("train", groups=3, deadline_s=0)) == ["p2", "p0", "p1"]

    def test_a_task_that_gave_columns_gives_them_again_and_one_that_took_rows_is_done(self) -> None:
        queue = self.filled(REFERENCE, TRAIN, num_prompts=2)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        queue.drop("p0", reason="lost", reissue=True)
        assert queue.ledger()[0].acked_by == {"train"}
        put_all(queue, "p0")
        lease = queue.lease("reference", groups=2, deadline_s=0)
        given = ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])
        queue.ack(lease, {"reference_logprobs": given})
        assert [entry.state for entry in queue.ledger()] == ["done", "settled"]
        queue.drop("p1", reason="lost", reissue=True)
        assert queue.ledger()[1].acked_by == frozenset()

    def test_dropped_prompts_stay_dropped(self) -> None:
        queue = self.filled(num_prompts=1)
        queue.drop("p0", reason="too easy")
        with refuses(ValueError, "'p0' is dropped (too easy)"):
            queue.drop("p0", reason="again", reissue=True)
        with refuses(NothingToLeaseError, "1 dropped"):
            queue.lease("train", groups=1, deadline_s=0)
        assert (queue.ledger()[0].attempt, queue.unsettled()) == (1, [])

    def test_prompts_without_whole_result_are_listed_in_the_order_of_issue(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=3)
        self.advance(queue, 5)
        queue.issue(make_prompts(5)[2:], num_sessions=2)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        queue.fail("p2", 0, reason="engine aborted")
        put_all(queue, "p3", num_sessions=2)
        queue.drop("p4", reason="too easy")
        queue.claim(prompts=1, deadline_s=0)
        self.advance(queue, 2)
        queue.drop("p1", reason="lost", reissue=True)
        self.advance(queue, 1)
        found = [(u.prompt.uid, u.sessions, u.age_s, u.attempt, u.is_claimed) for u in queue.unsettled()]
        assert found == [
            ("p0", (0, 2), 8.0, 1, True),
            ("p1", (0, 1, 2), 1.0, 2, False),
            ("p2", (1,), 3.0, 1, False),
        ]
        assert queue.unsettled()[0].prompt.input_ids.tolist() == [1, 2]

    def test_nothing_is_listed_once_everything_is_settled(self) -> None:
        queue = self.filled(num_prompts=2, num_sessions=2)
        assert queue.unsettled() == []
        queue.ack(queue.lease("train", groups=2, deadline_s=0))
        queue.forget_finished()
        assert queue.unsettled() == []
