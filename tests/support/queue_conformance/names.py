"""Checks of leases of named prompts, and of acks by name without a lease."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from queue_conformance.tools import LOG, TRAIN_LATE
from rl_core.errors import DataError, DeadlineError, OutdatedLeaseError
from rl_core.queue.client import TransferQueue
from rl_core.testing.fixtures import make_prompts, make_trajectory, ragged_like
from rl_core.testing.queue_checks import DEADLINE_S, REFERENCE, TRAIN, QueueChecks, put_all, refuses, states_of, uids_of


class NameChecks(QueueChecks):
    """A lease by name returns exactly the named groups, or none."""

    def test_late_columns_fit_the_order_in_which_groups_are_named(self) -> None:
        queue = self.filled(REFERENCE, TRAIN_LATE, num_prompts=3)
        lease = queue.lease("reference", prompts=["p2", "p0", "p1"], deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-2.0, -0.5, -1.0])})
        batch = queue.lease("train", prompts=["p0", "p2"], deadline_s=0).batch
        assert [float(row[0]) for row in batch.ragged("reference_logprobs")] == [-0.5, -2.0]

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

    def test_a_group_is_done_when_every_task_is(self) -> None:
        queue = self.filled(REFERENCE, TRAIN, LOG, num_prompts=2)
        queue.finish("train", ["p0", "p1"])
        lease = queue.lease("reference", groups=2, deadline_s=0)
        queue.finish("log", ["p1"])
        assert states_of(queue) == ["settled", "settled"]
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])})
        assert states_of(queue) == ["settled", "done"]
        queue.finish("log", ["p0"])
        assert (states_of(queue), queue.stats()["size_bytes"]) == (["done", "done"], 0)

    def test_what_was_acked_before_is_refused_and_named(self) -> None:
        queue = self.filled(TRAIN, LOG, num_prompts=4)
        queue.ack(queue.lease("train", prompts=["p2"], deadline_s=0))
        queue.finish("train", ["p1"])
        queue.finish("log", ["p1"])
        with refuses(DataError, "2 of 4 prompts", "acked by task 'train'", "'p1', 'p2'"):
            queue.finish("train", ["p0", "p1", "p2", "p3"])
        assert [sorted(entry.acked_by) for entry in queue.ledger()] == [[], ["log", "train"], ["train"], []]
        assert queue.stats()["acks/train"] == 2
        queue.finish("train", ["p3", "p0"])
        queue.finish("log", ["p2", "p3", "p0"])
        assert set(states_of(queue)) == {"done"}

    def test_what_a_consumer_of_the_task_holds_is_refused_and_named(self) -> None:
        queue = self.filled(TRAIN, LOG, num_prompts=3)
        lease = queue.lease("train", prompts=["p1"], deadline_s=0, lease_s=10)
        queue.lease("log", groups=3, deadline_s=0)
        words = f"'p1' is leased by a consumer of this task (lease {lease.lease_id})"
        with refuses(DataError, "1 of 2 prompts", words):
            queue.finish("train", ["p0", "p1"])
        assert queue.stats()["acks/train"] == 0
        queue.finish("train", ["p0"])
        self.advance(queue, 10)
        queue.finish("train", ["p1", "p2"])
        with refuses(OutdatedLeaseError, f"lease {lease.lease_id}"):
            queue.ack(lease)
        assert queue.stats()["acks/train"] == 3

    def test_what_could_not_have_been_read_is_refused(self) -> None:
        queue = self.filled(REFERENCE, TRAIN_LATE, num_prompts=3)
        queue.issue(make_prompts(5)[3:], num_sessions=3)
        queue.put("p3", 1, [make_trajectory("p3", 1)])
        queue.drop("p4", reason="too easy")
        lease = queue.lease("reference", prompts=["p0", "p1"], deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])})
        for uid, words in {
            "p2": "'p2' lacks columns ['reference_logprobs']",
            "p3": "'p3' lacks 2 of 3 sessions",
            "p4": "'p4' is dropped (too easy)",
            "p9": "'p9' was never issued",
        }.items():
            with refuses(DataError, words):
                queue.finish("train", ["p0", uid])
        queue.drop("p1", reason="lost", reissue=True)
        with refuses(DataError, "'p1' lacks 1 of 1 sessions"):
            queue.finish("train", ["p0", "p1"])
        assert queue.stats()["acks/train"] == 0
        queue.finish("train", ["p0"])
        assert queue.ledger()[0].state == "done"

    def test_impossible_names_are_refused(self) -> None:
        queue = self.filled(REFERENCE, TRAIN, num_prompts=2)

        def lease(task: str, prompts: Any, **options: Any) -> None:
            queue.lease(task, prompts=prompts, deadline_s=0, **options)

        for call in (lease, queue.finish):
            with refuses(DataError, "'p1'", "more than once"):
                call("train", ["p1", "p0", "p1"])
            with refuses(ValueError, "must be a sequence, each a string", "'p0'"):
                call("train", "p0")
            with refuses(ValueError, "must be a sequence, each a string"):
                call("train", make_prompts(1))  # type: ignore[arg-type]
            for task in ("tarin", "generate"):
                with refuses(DataError, f"'{task}'"):
                    call(task, ["p0"])
        with refuses(DataError, "at least 1 group", "found 0"):
            lease("train", [])
        with refuses(DataError, "allow_fewer"):
            lease("train", ["p0"], allow_fewer=True)
        with refuses(DataError, "groups or prompts"):
            lease("train", ["p0"], groups=1)
        with refuses(DataError, "'reference' adds ['reference_logprobs']"):
            queue.finish("reference", ["p0"])
        queue.finish("train", [])
        assert (queue.stats()["leases"], queue.stats()["acks/train"]) == (0, 0)
