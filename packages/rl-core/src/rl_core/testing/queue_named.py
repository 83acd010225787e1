# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of leases that name their prompts."""

from collections.abc import Callable
from dataclasses import replace

from rl_core.errors import DataError, DeadlineError, OutdatedLeaseError
from rl_core.queue.interface import Lease, TransferQueue
from rl_core.testing.queue_checks import (
    DEADLINE_S,
    REFERENCE,
    TRAIN,
    TRAIN_IN_ORDER,
    TRAIN_LATE,
    QueueChecks,
    put_all,
    refuses,
    uids_of,
)
from rl_core.testing.queue_staleness import sampled_by
from rl_core.testing.rows import make_prompts, make_trajectory, ragged_like


class NamedLeaseChecks(QueueChecks):
    """Exactly the groups that are named, in that order, or none."""

    def test_named_groups_come_in_the_order_in_which_they_are_named(self) -> None:
        for task in (TRAIN, TRAIN_IN_ORDER):
            queue = self.filled(task, num_prompts=5, num_sessions=2)
            lease = queue.lease("train", prompts=["p3", "p0", "p4"], deadline_s=0)
            assert uids_of(lease) == ["p3", "p0", "p4"]
            assert lease.batch.keys == tuple((uid, session, 0) for uid in ("p3", "p0", "p4") for session in (0, 1))
            others = queue.lease("train", groups=2, deadline_s=0)
            assert uids_of(others) == ["p1", "p2"]
            queue.ack(lease)
            queue.release(others)
            assert [entry.state for entry in queue.ledger()] == ["done", "settled", "settled", "done", "done"]
            assert uids_of(queue.lease("train", groups=2, deadline_s=0)) == ["p1", "p2"]

    def test_groups_that_were_named_and_released_come_again_in_their_order(self) -> None:
        queue = self.filled(TRAIN_IN_ORDER, num_prompts=3)
        for _ in range(3):
            queue.release(queue.lease("train", prompts=("p2", "p1"), deadline_s=0))
        assert uids_of(queue.lease("train", groups=3, deadline_s=0)) == ["p0", "p1", "p2"]

    def test_late_columns_fit_the_order_in_which_groups_are_named(self) -> None:
        queue = self.filled(REFERENCE, TRAIN_LATE, num_prompts=3)
        lease = queue.lease("reference", prompts=["p2", "p0", "p1"], deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-2.0, -0.5, -1.0])})
        batch = queue.lease("train", prompts=["p0", "p2"], deadline_s=0).batch
        assert [float(row[0]) for row in batch.ragged("reference_logprobs")] == [-0.5, -2.0]

    def test_a_consumer_waits_until_all_of_them_are_ready(self) -> None:
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

    def test_a_consumer_is_woken_by_a_release_and_by_late_columns(self) -> None:
        queue = self.filled(REFERENCE, TRAIN_LATE, num_prompts=2)
        first = queue.lease("reference", groups=1, deadline_s=0)
        reference = self.spawn(queue.lease, "reference", prompts=["p1", "p0"], deadline_s=DEADLINE_S)
        train = self.spawn(queue.lease, "train", prompts=["p1"], deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 2)
        queue.release(first)
        both = reference.result(DEADLINE_S)
        assert queue.stats()["waiting/lease"] == 1
        queue.ack(both, {"reference_logprobs": ragged_like(both.batch, "reference_logprobs", [-1.0, -2.0])})
        assert uids_of(train.result(DEADLINE_S)) == ["p1"]

    def test_two_consumers_that_name_the_same_groups_take_turns(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=1)
        first = self.spawn(queue.lease, "train", prompts=["p0", "p1"], deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        second = self.spawn(queue.lease, "train", prompts=["p1", "p0"], deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 2)
        for uid in ("p1", "p0"):
            put_all(queue, uid)
        queue.release(first.result(DEADLINE_S))
        queue.ack(second.result(DEADLINE_S))
        assert {entry.state for entry in queue.ledger()} == {"done"}

    def test_a_passed_deadline_says_which_are_not_ready_and_what_they_lack(self) -> None:
        queue = self.queue(REFERENCE, replace(TRAIN, needs=TRAIN.needs | REFERENCE.gives))
        queue.issue(make_prompts(4), num_sessions=3)
        for uid in ("p0", "p1", "p2"):
            put_all(queue, uid, num_sessions=3)
        queue.put("p3", 1, [make_trajectory("p3", 1)])
        lease = queue.lease("reference", groups=2, deadline_s=0)
        given = ragged_like(lease.batch, "reference_logprobs", [-1.0] * 6)
        queue.ack(lease, {"reference_logprobs": given})
        queue.lease("train", prompts=["p1"], deadline_s=0)
        words = (
            "lease of 4 groups for task 'train' waited: 3 not ready",
            "'p3' lacks 2 of 3 sessions",
            "'p2' lacks columns ['reference_logprobs']",
            "'p1' is leased by a consumer of this task",
        )
        with refuses(DeadlineError, *words):
            queue.lease("train", prompts=["p3", "p2", "p1", "p0"], deadline_s=0)
        assert queue.stats()["waiting/lease"] == 0
        assert uids_of(queue.lease("train", prompts=["p0"], deadline_s=0)) == ["p0"], "nothing was taken"

    def test_what_can_never_come_is_refused_at_once(self) -> None:
        queue = self.filled(REFERENCE, TRAIN, num_prompts=5)
        queue.ack(queue.lease("train", prompts=["p1", "p2"], deadline_s=0))
        lease = queue.lease("reference", prompts=["p2"], deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0])})
        queue.drop("p3", reason="too easy")
        for uid, words in {
            "p9": ("'p9'", "never issued"),
            "p1": ("'p1'", "acked by task 'train'"),
            "p2": ("'p2' is done",),
            "p3": ("'p3' is dropped", "too easy"),
        }.items():
            with refuses(DataError, *words):
                queue.lease("train", prompts=["p0", uid], deadline_s=DEADLINE_S)
        assert (queue.stats()["leases"], queue.stats()["waiting/lease"]) == (0, 0)
        assert uids_of(queue.lease("train", prompts=["p4", "p0"], deadline_s=0)) == ["p4", "p0"]

    def test_what_can_no_longer_come_is_refused_during_the_wait(self) -> None:
        def ack_one(queue: TransferQueue) -> None:
            queue.ack(queue.lease("train", prompts=["p0"], deadline_s=0))

        ends: list[tuple[Callable[[TransferQueue], object], str]] = [
            (lambda queue: queue.drop("p1", reason="too easy"), "'p1' is dropped (too easy)"),
            (lambda queue: queue.fail("p1", 0, reason="engine aborted"), "'p1' is dropped (no rows: engine aborted)"),
            (ack_one, "'p0' is done"),
        ]
        for end, words in ends:
            queue = self.queue()
            queue.issue(make_prompts(2), num_sessions=1)
            put_all(queue, "p0")
            waiter = self.spawn(queue.lease, "train", prompts=["p0", "p1"], deadline_s=DEADLINE_S)
            self.wait_for_stat(queue, "waiting/lease", 1)
            end(queue)
            with refuses(DataError, words):
                waiter.result(DEADLINE_S)
            assert queue.stats()["leases"] == 0

    def test_a_consumer_waits_for_a_named_prompt_that_is_issued_again(self) -> None:
        queue = self.filled(num_prompts=2)
        queue.drop("p0", reason="lost", reissue=True)
        waiter = self.spawn(queue.lease, "train", prompts=["p1", "p0"], deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        queue.drop("p1", reason="lost", reissue=True)
        for uid in ("p0", "p1"):
            put_all(queue, uid)
        assert uids_of(waiter.result(DEADLINE_S)) == ["p1", "p0"]

    def test_a_named_group_that_is_too_stale_is_dropped_and_named(self) -> None:
        queue = self.queue(replace(TRAIN, max_staleness=1))
        queue.issue(make_prompts(3), num_sessions=1)
        for index in range(3):
            queue.put(f"p{index}", 0, [sampled_by(f"p{index}", 0, index)])
        queue.set_policy_version(2)
        with refuses(DataError, "1 of 2 prompts", "too stale", "max_staleness 1", "'p0'"):
            queue.lease("train", prompts=["p2", "p0"], deadline_s=DEADLINE_S)
        entries = queue.ledger()
        assert [entry.state for entry in entries] == ["dropped", "settled", "settled"]
        assert (entries[0].reason, queue.stats()["drops/stale"]) == ("stale", 1)
        assert uids_of(queue.lease("train", prompts=["p2", "p1"], deadline_s=0)) == ["p2", "p1"]

    def test_a_named_group_that_becomes_stale_during_the_wait_is_refused(self) -> None:
        queue = self.queue(replace(TRAIN, max_staleness=0))
        queue.issue(make_prompts(2), num_sessions=1)
        queue.put("p0", 0, [sampled_by("p0", 0, 0)])
        waiter = self.spawn(queue.lease, "train", prompts=["p0", "p1"], deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        queue.set_policy_version(1)
        with refuses(DataError, "too stale", "'p0'"):
            waiter.result(DEADLINE_S)
        assert [entry.state for entry in queue.ledger()] == ["dropped", "issued"]

    def test_a_full_queue_lets_in_what_a_consumer_waits_for_by_name(self) -> None:
        queue = self.queue(TRAIN, capacity_rows=2)
        queue.issue(make_prompts(3), num_sessions=1)
        for uid in ("p0", "p1"):
            put_all(queue, uid)
        with refuses(DeadlineError, "2 of 2 held"):
            queue.put("p2", 0, [make_trajectory("p2", 0)], deadline_s=0)
        waiter = self.spawn(queue.lease, "train", prompts=["p2"], deadline_s=DEADLINE_S)
        put_all(queue, "p2")
        assert uids_of(waiter.result(DEADLINE_S)) == ["p2"]

    def test_named_leases_end_like_others(self) -> None:
        queue = self.filled(num_prompts=2)
        old: Lease = queue.lease("train", prompts=["p1", "p0"], deadline_s=0, lease_s=10)
        assert old.expires_at == self.clock() + 10
        old = queue.extend(old, lease_s=20)
        self.advance(queue, 20)
        new = queue.lease("train", prompts=["p1"], deadline_s=0)
        with refuses(OutdatedLeaseError, f"lease {old.lease_id}"):
            queue.ack(old)
        queue.drop("p1", reason="too easy")
        with refuses(OutdatedLeaseError, f"lease {new.lease_id}"):
            queue.ack(new)

    def test_impossible_names_are_refused(self) -> None:
        queue = self.filled(num_prompts=2)
        with refuses(DataError, "at least 1 group", "found 0"):
            queue.lease("train", prompts=[], deadline_s=0)
        with refuses(DataError, "'p1'", "more than once"):
            queue.lease("train", prompts=["p1", "p0", "p1"], deadline_s=0)
        with refuses(DataError, "list of their uids", "'p0'"):
            queue.lease("train", prompts="p0", deadline_s=0)
        with refuses(DataError, "list of their uids"):
            queue.lease("train", prompts=make_prompts(1), deadline_s=0)  # type: ignore[arg-type]
        with refuses(DataError, "allow_fewer"):
            queue.lease("train", prompts=["p0"], allow_fewer=True, deadline_s=0)
        with refuses(DataError, "groups or of prompts"):
            queue.lease("train", prompts=["p0"], groups=1, deadline_s=0)
        with refuses(DataError, "'generate'"):
            queue.lease("generate", prompts=["p0"], deadline_s=0)
        with refuses(DataError, "'tarin'"):
            queue.lease("tarin", prompts=["p0"], deadline_s=0)
        assert queue.stats()["leases"] == 0
