"""Checks of claims, which assign prompts to producers."""

from queue_conformance.tools import batch_of
from rl_core.errors import DataError, DeadlineError, OutdatedLeaseError
from rl_core.queue.client import TransferQueue
from rl_core.testing.fixtures import make_prompts, make_trajectory
from rl_core.testing.queue_checks import QueueChecks, put_all, refuses, uids_of


class ClaimChecks(QueueChecks):
    """Prompts belong to one producer at a time, until all their sessions are settled."""

    def issued(self, num_prompts: int, *, num_sessions: int = 1) -> TransferQueue:
        """Return a queue with prompts without sessions."""
        queue = self.queue()
        queue.issue(make_prompts(num_prompts), num_sessions=num_sessions)
        return queue

    def test_prompts_are_claimed_in_the_order_of_issue_by_one_producer_each(self) -> None:
        queue = self.issued(5, num_sessions=2)
        first, second = (queue.claim(prompts=2, deadline_s=0) for _ in range(2))
        assert (uids_of(first), uids_of(second)) == (["p0", "p1"], ["p2", "p3"])
        assert first.sessions == ((0, 1), (0, 1))
        assert first.lease_id != second.lease_id
        assert first.prompts[1].input_ids.tolist() == [1, 2]
        assert uids_of(queue.claim(prompts=9, deadline_s=0)) == ["p4"]
        with refuses(DeadlineError, "5 issued"):
            queue.claim(prompts=1, deadline_s=0)
        assert (queue.stats()["claims"], queue.stats()["leases"]) == (3, 0)

    def test_a_claim_leaves_out_what_is_settled_or_dropped(self) -> None:
        queue = self.issued(4, num_sessions=3)
        put_all(queue, "p0", num_sessions=3)
        queue.put("p1", 1, [make_trajectory("p1", 1)])
        queue.fail("p1", 0, reason="engine aborted")
        queue.drop("p2", reason="too easy")
        claim = queue.claim(prompts=4, deadline_s=0)
        assert (uids_of(claim), claim.sessions) == (["p1", "p3"], ((2,), (0, 1, 2)))

    def test_a_released_claim_is_handed_out_again(self) -> None:
        queue = self.issued(3, num_sessions=2)
        claim = queue.claim(prompts=2, deadline_s=0)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        queue.release(claim)
        queue.release(claim)
        again = queue.claim(prompts=2, deadline_s=0)
        assert (uids_of(again), again.sessions) == (["p0", "p1"], ((0,), (0, 1)))

    def test_an_extended_claim_stays(self) -> None:
        queue = self.issued(1)
        claim = queue.claim(prompts=1, deadline_s=0, claim_s=10)
        self.advance(queue, 9)
        extended = queue.extend(claim, lease_s=10)
        assert (extended.lease_id, extended.expires_at) == (claim.lease_id, self.clock() + 10)
        assert extended.sessions == claim.sessions
        self.advance(queue, 9)
        assert queue.unsettled()[0].is_claimed
        self.advance(queue, 1)
        assert not queue.unsettled()[0].is_claimed

    def test_a_claim_is_fulfilled_by_its_last_session(self) -> None:
        queue = self.issued(3, num_sessions=2)
        claim = queue.claim(prompts=3, deadline_s=0)
        queue.put_batch(batch_of(("p0", 0, 0), ("p0", 1, 0), ("p2", 0, 0)))
        queue.put("p1", 0, [])
        queue.fail("p1", 1, reason="engine aborted")
        queue.extend(claim, lease_s=100)
        assert queue.stats()["claims"] == 1
        queue.put("p2", 1, [make_trajectory("p2", 1)])
        assert queue.stats()["claims"] == 0
        with refuses(OutdatedLeaseError, f"lease {claim.lease_id}", "was fulfilled"):
            queue.extend(claim, lease_s=100)
        queue.release(claim)
        assert [entry.state for entry in queue.ledger()] == ["settled", "dropped", "settled"]

    def test_puts_need_no_claim_and_count_beside_one(self) -> None:
        queue = self.issued(2, num_sessions=2)
        put_all(queue, "p0", num_sessions=2)
        claim = queue.claim(prompts=2, deadline_s=0, claim_s=10)
        assert uids_of(claim) == ["p1"]
        queue.put("p1", 0, [make_trajectory("p1", 0)])
        self.advance(queue, 10)
        queue.put("p1", 1, [make_trajectory("p1", 1)])
        assert [entry.state for entry in queue.ledger()] == ["settled", "settled"]

    def test_a_drop_ends_the_claim_on_its_prompt(self) -> None:
        queue = self.issued(1)
        claim = queue.claim(prompts=1, deadline_s=0)
        queue.drop("p0", reason="too easy", reissue=True)
        with refuses(OutdatedLeaseError, f"lease {claim.lease_id}"):
            queue.extend(claim, lease_s=10)
        assert uids_of(queue.claim(prompts=1, deadline_s=0)) == ["p0"]

    def test_impossible_claims_are_refused(self) -> None:
        queue = self.issued(1)
        with refuses(DataError, "at least 1", "found 0"):
            queue.claim(prompts=0, deadline_s=0)
        with refuses(DataError, "'generate'"):
            queue.lease("generate", groups=1, deadline_s=0)
