"""Checks of each method's result, the queue's clock, and the types of errors."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from queue_conformance.tools import TRAIN_LATE, sampled_by
from rl_core.data.ragged import Ragged
from rl_core.errors import DataError, DeadlineError, NothingToLeaseError, OutdatedLeaseError, ShapeError
from rl_core.queue.client import TransferQueue
from rl_core.testing.fixtures import make_prompts, make_trajectory, ragged_like
from rl_core.testing.queue_checks import (
    DEADLINE_S,
    REFERENCE,
    TRAIN,
    TRAIN_IN_ORDER,
    QueueChecks,
    put_all,
    refuses,
    states_of,
    uids_of,
)


class CallChecks(QueueChecks):
    """Checks of each method's result, the queue's clock, and waits for named prompts."""

    def test_the_ledger_follows_each_prompt(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(4), num_sessions=2)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        for uid in ("p1", "p2"):
            queue.fail(uid, 0, reason="engine aborted")
            queue.put(uid, 1, [make_trajectory(uid, 1)])
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        queue.drop("p3", reason="too easy")
        failed = {0: "engine aborted"}
        expected = [
            ("p0", "issued", 1, {}, set(), None),
            ("p1", "done", 2, failed, {"train"}, None),
            ("p2", "settled", 2, failed, set(), None),
            ("p3", "dropped", 0, {}, set(), "too easy"),
        ]
        found = [
            (e.prompt_uid, e.state, e.sessions_settled, dict(e.sessions_failed), set(e.acked_by), e.reason)
            for e in queue.ledger()
        ]
        assert found == expected

    def test_finished_prompts_are_forgotten_on_request(self) -> None:
        queue = self.filled(num_prompts=3)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        queue.drop("p1", reason="too easy")
        assert queue.forget_finished() == 2
        assert queue.forget_finished() == 0
        assert [entry.prompt_uid for entry in queue.ledger()] == ["p2"]
        with refuses(DataError, "'p0'", "forgotten"):
            put_all(queue, "p0")

    def test_the_stats_count_what_is_held(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(3), num_sessions=2)
        put_all(queue, "p0", num_sessions=2)
        queue.put("p1", 0, [make_trajectory("p1", 0, output) for output in range(3)])
        queue.drop("p2", reason="too easy")
        self.advance(queue, 5)
        queue.lease("train", groups=1, deadline_s=0)
        self.advance(queue, 2)
        stats = queue.stats()
        found = {name: value for name, value in stats.items() if value and not name.startswith("size_bytes")}
        assert found == {
            "groups/dropped": 1.0,
            "groups/issued": 1.0,
            "groups/settled": 1.0,
            "rows": 5.0,
            "rows/issued": 3.0,
            "rows/settled": 2.0,
            "rows/leased": 2.0,
            "leases": 1.0,
            "oldest_lease_s": 2.0,
            "oldest_issued_s": 7.0,
            "drops/too easy": 1.0,
        }
        for name, num_rows in [("size_bytes", 5), ("size_bytes/issued", 3), ("size_bytes/leased", 2)]:
            assert num_rows * 5 * (4 + 1 + 4 + 4) <= stats[name] < num_rows * 5 * 2 * (4 + 1 + 4 + 4)

    def test_an_empty_queue_holds_nothing(self) -> None:
        queue = self.filled(num_prompts=2)
        queue.ack(queue.lease("train", groups=2, deadline_s=0))
        queue.forget_finished()
        self.advance(queue, 3)
        assert {name: value for name, value in queue.stats().items() if value} == {"acks/train": 2.0}
        assert (queue.ledger(), queue.unsettled()) == ([], [])

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

    def test_a_lease_that_ran_out_is_delivered_again_and_its_ack_refused(self) -> None:
        queue = self.filled(num_prompts=2)
        old = queue.lease("train", groups=2, deadline_s=0, lease_s=10)
        assert old.expires_at == self.clock() + 10
        self.advance(queue, 9.5)
        with refuses(DeadlineError, "0 ready"):
            queue.lease("train", groups=1, deadline_s=0)
        self.advance(queue, 0.5)
        new = queue.lease("train", groups=2, deadline_s=0)
        assert (uids_of(new), new.batch.keys) == (["p0", "p1"], old.batch.keys)
        with refuses(OutdatedLeaseError, f"lease {old.lease_id}", "'train'"):
            queue.ack(old)
        queue.release(old)
        queue.ack(new)
        assert [entry.state for entry in queue.ledger()] == ["done", "done"]

    def test_an_extended_lease_stays(self) -> None:
        queue = self.filled(num_prompts=1)
        lease = queue.lease("train", groups=1, deadline_s=0, lease_s=10)
        self.advance(queue, 9)
        extended = queue.extend(lease, lease_s=10)
        assert (extended.lease_id, extended.expires_at) == (lease.lease_id, self.clock() + 10)
        self.advance(queue, 9)
        queue.ack(extended)
        with refuses(OutdatedLeaseError, f"lease {lease.lease_id}"):
            queue.extend(extended, lease_s=10)

    def test_a_drop_ends_the_leases_on_its_prompt_alone(self) -> None:
        queue = self.filled(num_prompts=3)
        both = queue.lease("train", groups=2, deadline_s=0)
        other = queue.lease("train", groups=1, deadline_s=0)
        queue.drop("p0", reason="too stale")
        with refuses(OutdatedLeaseError, f"lease {both.lease_id}"):
            queue.ack(both)
        queue.ack(other)
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p1"]
        assert [entry.state for entry in queue.ledger()] == ["dropped", "settled", "done"]

    def test_what_a_lost_producer_had_not_put_is_handed_out_again(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=3)
        old = queue.claim(prompts=2, deadline_s=0, claim_s=10)
        assert old.expires_at == self.clock() + 10
        put_all(queue, "p0", num_sessions=3)
        queue.put("p1", 1, [make_trajectory("p1", 1)])
        self.advance(queue, 9.5)
        with refuses(DeadlineError, "1 leased"):
            queue.claim(prompts=2, deadline_s=0)
        self.advance(queue, 0.5)
        new = queue.claim(prompts=2, deadline_s=0)
        assert (uids_of(new), new.sessions) == (["p1"], ((0, 2),))
        with refuses(OutdatedLeaseError, f"lease {old.lease_id}"):
            queue.extend(old, lease_s=10)
        queue.release(old)
        assert queue.stats()["claims"] == 1

    def test_named_groups_come_in_the_order_in_which_they_are_named(self) -> None:
        for task in (TRAIN, TRAIN_IN_ORDER):
            queue = self.filled(task, num_prompts=5, num_sessions=2)
            queue.release(queue.lease("train", prompts=("p2", "p1"), deadline_s=0))
            lease = queue.lease("train", prompts=["p3", "p0", "p4"], deadline_s=0)
            assert uids_of(lease) == ["p3", "p0", "p4"]
            assert lease.batch.keys == tuple((uid, session, 0) for uid in ("p3", "p0", "p4") for session in (0, 1))
            others = queue.lease("train", groups=2, deadline_s=0)
            assert uids_of(others) == ["p1", "p2"]
            queue.ack(lease)
            queue.release(others)
            assert [entry.state for entry in queue.ledger()] == ["done", "settled", "settled", "done", "done"]
            assert uids_of(queue.lease("train", groups=2, deadline_s=0)) == ["p1", "p2"]

    def test_groups_are_acked_after_they_were_released(self) -> None:
        for task in (TRAIN, TRAIN_IN_ORDER):
            queue = self.filled(task, num_prompts=4, num_sessions=2)
            for uids in (["p2", "p0"], ["p1"]):
                queue.release(queue.lease("train", prompts=uids, deadline_s=0))
            queue.finish("train", ["p1", "p2"])
            assert states_of(queue) == ["settled", "done", "done", "settled"]
            assert [sorted(entry.acked_by) for entry in queue.ledger()] == [[], ["train"], ["train"], []]
            assert (queue.stats()["acks/train"], queue.stats()["rows"]) == (2, 4)
            queue.finish("train", ("p0",))
            assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p3"]

    def test_a_refused_ack_changes_nothing_and_may_be_corrected(self) -> None:
        queue = self.filled(REFERENCE, TRAIN_LATE, num_prompts=1, num_sessions=2)
        lease = queue.lease("reference", groups=1, deadline_s=0)
        good = ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])
        with refuses(DataError, "must add exactly the columns ['reference_logprobs']", "found []"):
            queue.ack(lease)
        with refuses(DataError, "found ['teacher_logprobs']"):
            queue.ack(lease, {"teacher_logprobs": good})
        with refuses(DataError, "reference_logprobs", "'p0'", "token 0", "finite"):
            queue.ack(lease, {"reference_logprobs": Ragged(np.full_like(good.values, np.nan), good.offsets)})
        with refuses(ShapeError, "do not fit into float32"):
            queue.ack(lease, {"reference_logprobs": Ragged(np.full(len(good.values), -1e300), good.offsets)})
        with refuses(ShapeError, "2 rows", "found 1"):
            queue.ack(lease, {"reference_logprobs": good.select([0])})
        with refuses(ShapeError, "row 0", "5 tokens", "found 4"):
            shifted = Ragged(good.values, np.asarray([0, 4, 10]))
            queue.ack(lease, {"reference_logprobs": shifted})
        assert queue.ledger()[0].acked_by == frozenset()
        queue.ack(lease, {"reference_logprobs": Ragged(good.values.astype(np.float64), good.offsets)})
        assert queue.ledger()[0].acked_by == {"reference"}

    def test_stale_groups_are_dropped_instead_of_leased(self) -> None:
        queue = self.queue(replace(TRAIN, max_staleness=1))
        queue.issue(make_prompts(3), num_sessions=1)
        for version in range(3):
            queue.put(f"p{version}", 0, [sampled_by(f"p{version}", 0, version)])
        queue.set_policy_version(2)
        queue.set_policy_version(1)  # it never falls
        assert uids_of(queue.lease("train", groups=2, deadline_s=0)) == ["p1", "p2"]
        entry = queue.ledger()[0]
        assert (entry.state, entry.reason, entry.num_rows) == ("dropped", "stale", 0)
        assert queue.stats()["drops/stale"] == 1

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
