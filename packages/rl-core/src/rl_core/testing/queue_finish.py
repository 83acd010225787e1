# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of acks by name, without a lease."""

from collections.abc import Callable

from rl_core.errors import DataError, NothingToLeaseError, OutdatedLeaseError
from rl_core.queue.interface import TaskSpec, TransferQueue
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
from rl_core.testing.rows import make_prompts, make_trajectory, ragged_like

LOG = TaskSpec(name="log", needs=frozenset({"reward"}))


class FinishChecks(QueueChecks):
    """What a consumer read and released counts when it says so: once, and all of it or nothing."""

    def states(self, queue: TransferQueue) -> list[str]:
        """The state of each prompt."""
        return [entry.state for entry in queue.ledger()]

    def test_groups_are_acked_after_they_were_released(self) -> None:
        for task in (TRAIN, TRAIN_IN_ORDER):
            queue = self.filled(task, num_prompts=4, num_sessions=2)
            for uids in (["p2", "p0"], ["p1"]):
                queue.release(queue.lease("train", prompts=uids, deadline_s=0))
            queue.finish("train", ["p1", "p2"])
            assert self.states(queue) == ["settled", "done", "done", "settled"]
            assert [sorted(entry.acked_by) for entry in queue.ledger()] == [[], ["train"], ["train"], []]
            assert (queue.stats()["acks/train"], queue.stats()["rows"]) == (2, 4)
            queue.finish("train", ("p0",))
            assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p3"]

    def test_a_group_is_done_when_every_task_is(self) -> None:
        queue = self.filled(REFERENCE, TRAIN, LOG, num_prompts=2)
        queue.finish("train", ["p0", "p1"])
        lease = queue.lease("reference", groups=2, deadline_s=0)
        queue.finish("log", ["p1"])
        assert self.states(queue) == ["settled", "settled"]
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])})
        assert self.states(queue) == ["settled", "done"]
        queue.finish("log", ["p0"])
        assert (self.states(queue), queue.stats()["size_bytes"]) == (["done", "done"], 0)

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
        assert set(self.states(queue)) == {"done"}

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

    def test_a_producer_that_waits_for_room_is_woken(self) -> None:
        queue = self.queue(TRAIN, capacity_rows=2)
        queue.issue(make_prompts(3), num_sessions=1)
        for uid in ("p0", "p1"):
            put_all(queue, uid)
        producer = self.spawn(put_all, queue, "p2")
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.release(queue.lease("train", groups=2, deadline_s=0))
        assert queue.stats()["waiting/put"] == 1
        queue.finish("train", ["p1"])
        producer.result(DEADLINE_S)

    def test_consumers_that_wait_are_told(self) -> None:
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

    def test_impossible_names_are_refused(self) -> None:
        queue = self.filled(REFERENCE, TRAIN, num_prompts=2)
        with refuses(DataError, "'reference' gives ['reference_logprobs']"):
            queue.finish("reference", ["p0"])
        for task in ("tarin", "generate"):
            with refuses(DataError, f"unknown task '{task}'"):
                queue.finish(task, ["p0"])
        with refuses(DataError, "'p0'", "more than once"):
            queue.finish("train", ["p0", "p1", "p0"])
        with refuses(DataError, "list of their uids"):
            queue.finish("train", "p0")
        queue.finish("train", [])
        assert queue.stats()["acks/train"] == 0
