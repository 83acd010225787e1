# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of partitions: prompts of several kinds in one queue, each kind with tasks of its own."""

from dataclasses import replace
from typing import Any

from rl_core.data.batch import Batch
from rl_core.data.records import Prompt
from rl_core.errors import DataError, DeadlineError, NothingToLeaseError
from rl_core.queue.interface import TransferQueue
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
from rl_core.testing.rows import make_prompt, make_trajectory, ragged_like

EVAL = replace(TRAIN, name="eval", partition="eval")
LOG_EVAL = replace(EVAL, name="log_eval")


def prompts_of(*uids: str) -> list[Prompt]:
    """Prompts with these uids."""
    return [make_prompt(uid) for uid in uids]


class PartitionChecks(QueueChecks):
    """Tasks and producers see the prompts of their partition alone; capacity is shared, and nobody waits for ever."""

    def split(self, *tasks: Any, **options: Any) -> TransferQueue:
        """A queue with prompts t0 to t2 for training and e0 to e2 for evaluation, issued in turns."""
        queue = self.queue(*(tasks or (TRAIN, EVAL)), **options)
        for index in range(3):
            queue.issue(prompts_of(f"e{index}"), num_sessions=1, partition="eval")
            queue.issue(prompts_of(f"t{index}"), num_sessions=1)
        return queue

    def test_a_task_leases_groups_of_its_partition_alone(self) -> None:
        queue = self.split()
        for uid in ("e1", "t2", "t0", "e0", "t1"):
            put_all(queue, uid)
        train = queue.lease("train", groups=9, deadline_s=0, allow_fewer=True)
        assert uids_of(train) == ["t2", "t0", "t1"]
        with refuses(DeadlineError, "2 ready", "1 issued, 2 settled in partition 'eval'", "'e2' lacks sessions [0]"):
            queue.lease("eval", groups=3, deadline_s=0)
        put_all(queue, "e2")
        assert uids_of(queue.lease("eval", groups=3, deadline_s=0)) == ["e1", "e0", "e2"]
        queue.ack(train)
        with refuses(NothingToLeaseError, "'train'", ": 3 done."):
            queue.lease("train", groups=1, deadline_s=0)

    def test_the_order_of_issue_is_kept_within_a_partition(self) -> None:
        queue = self.split(TRAIN_IN_ORDER, replace(EVAL, order="issue"))
        for uid in ("t1", "t0", "e2", "e1"):
            put_all(queue, uid)
        assert uids_of(queue.lease("train", groups=2, deadline_s=0)) == ["t0", "t1"], "e0 holds up no other partition"
        with refuses(DeadlineError, "'e0' lacks sessions"):
            queue.lease("eval", groups=1, deadline_s=0)
        put_all(queue, "e0")
        assert uids_of(queue.lease("eval", groups=3, deadline_s=0)) == ["e0", "e1", "e2"]

    def test_a_group_is_done_when_the_tasks_of_its_partition_are(self) -> None:
        queue = self.split(REFERENCE, TRAIN, EVAL, LOG_EVAL)
        for uid in ("e0", "t0"):
            put_all(queue, uid)
        for task in ("eval", "train"):
            queue.ack(queue.lease(task, groups=1, deadline_s=0))
        assert [entry.state for entry in queue.ledger()][:2] == ["settled", "settled"]
        queue.finish("log_eval", ["e0"])
        assert [entry.state for entry in queue.ledger()][:2] == ["done", "settled"]
        lease = queue.lease("reference", groups=1, deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0])})
        assert [entry.state for entry in queue.ledger()][:2] == ["done", "done"]
        assert queue.stats()["rows"] == 0

    def test_a_producer_claims_prompts_of_one_partition(self) -> None:
        queue = self.split()
        assert uids_of(queue.claim(prompts=2, deadline_s=0, partition="eval")) == ["e0", "e1"]
        claim = queue.claim(prompts=9, deadline_s=0)
        assert uids_of(claim) == ["t0", "t1", "t2"]
        waiter = self.spawn(queue.claim, prompts=1, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        queue.issue(prompts_of("e3"), num_sessions=1, partition="eval")
        assert queue.stats()["waiting/lease"] == 1
        assert uids_of(queue.claim(prompts=9, deadline_s=0, partition="eval")) == ["e2", "e3"]
        with refuses(DeadlineError, "'generate'", "4 issued in partition 'eval'", "4 leased"):
            queue.claim(prompts=1, deadline_s=0, partition="eval")
        queue.release(claim)
        assert uids_of(waiter.result(DEADLINE_S)) == ["t0"]

    def test_the_ledger_and_the_numbers_say_the_partition(self) -> None:
        queue = self.split()
        for uid in ("e0", "t0", "t1"):
            put_all(queue, uid)
        queue.drop("e1", reason="too easy")
        assert [entry.partition for entry in queue.ledger()] == ["eval", "train"] * 3
        found = [(unsettled.prompt.uid, unsettled.partition) for unsettled in queue.unsettled()]
        assert found == [("e2", "eval"), ("t2", "train")]
        stats = queue.stats()
        assert {name: value for name, value in stats.items() if name.startswith(("groups/", "partition_groups/"))} == {
            "groups/issued": 2,
            "groups/settled": 3,
            "groups/dropped": 1,
            "partition_groups/eval/issued": 1,
            "partition_groups/eval/settled": 1,
            "partition_groups/eval/dropped": 1,
            "partition_groups/train/issued": 1,
            "partition_groups/train/settled": 2,
        }
        assert (stats["partition_rows/eval/settled"], stats["partition_rows/train/settled"]) == (1, 2)
        shares = [stats[f"partition_size_bytes/{partition}/settled"] for partition in ("eval", "train")]
        assert (sum(shares), 2 * shares[0]) == (stats["size_bytes"], shares[1])

    def test_a_queue_with_one_partition_does_not_speak_of_it(self) -> None:
        queue = self.filled(num_prompts=1)
        assert not [name for name in queue.stats() if name.startswith("partition")]
        assert queue.ledger()[0].partition == "train"

    def test_finished_prompts_of_one_partition_are_forgotten(self) -> None:
        queue = self.split()
        for uid in ("e0", "t0", "t1"):
            put_all(queue, uid)
        queue.finish("eval", ["e0"])
        queue.finish("train", ["t0", "t1"])
        queue.drop("e2", reason="too easy")
        assert queue.forget_finished("eval") == 2
        assert [entry.prompt_uid for entry in queue.ledger()] == ["t0", "e1", "t1", "t2"]
        queue.issue(prompts_of("e0"), num_sessions=1)
        assert (queue.forget_finished("eval"), queue.forget_finished()) == (0, 2)
        assert [(entry.prompt_uid, entry.partition) for entry in queue.ledger()][2:] == [("e0", "train")]

    def test_a_prompt_that_is_issued_again_stays_in_its_partition(self) -> None:
        queue = self.split()
        for uid in ("e1", "t1"):
            put_all(queue, uid)
            queue.drop(uid, reason="lost", reissue=True)
        assert uids_of(queue.claim(prompts=9, deadline_s=0, partition="eval")) == ["e0", "e1", "e2"]
        assert uids_of(queue.claim(prompts=9, deadline_s=0)) == ["t0", "t1", "t2"]

    def test_one_put_may_settle_prompts_of_several_partitions(self) -> None:
        queue = self.split(TRAIN, EVAL, capacity_rows=4)
        rows = [make_trajectory(uid, 0) for uid in ("t0", "e1", "t2", "e0")]
        queue.put_batch(Batch.from_trajectories(rows))
        assert uids_of(queue.lease("eval", groups=2, deadline_s=0)) == ["e1", "e0"]
        assert uids_of(queue.lease("train", groups=2, deadline_s=0)) == ["t0", "t2"]

    def test_columns_that_another_partition_gives_late_are_the_producers_here(self) -> None:
        queue = self.split(REFERENCE, TRAIN, EVAL)
        batch = Batch.from_trajectories([make_trajectory(uid, 0) for uid in ("t0", "e0")])
        column = ragged_like(batch, "reference_logprobs", [-1.0, -2.0])
        queue.put_batch(batch.with_columns({"reference_logprobs": column}))
        assert "reference_logprobs" not in queue.lease("train", groups=1, deadline_s=0).batch
        row = queue.lease("eval", groups=1, deadline_s=0).batch.ragged("reference_logprobs")[0]
        assert float(row[0]) == -2.0

    def test_a_full_queue_does_not_keep_a_consumer_from_the_groups_of_another_partition(self) -> None:
        queue = self.split(TRAIN, EVAL, capacity_rows=2)
        for uid in ("t0", "t1"):
            put_all(queue, uid)
        step = queue.lease("train", groups=1, deadline_s=0)
        evaluation = self.spawn(queue.lease, "eval", groups=2, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        for uid in ("e0", "e1"):  # the trainer waits for the evaluation, and goes on with its step after it
            put_all(queue, uid)
        assert uids_of(evaluation.result(DEADLINE_S)) == ["e0", "e1"]
        with refuses(DeadlineError, "4 of 2 held"):
            queue.put("t2", 0, [make_trajectory("t2", 0)], deadline_s=0)
        queue.ack(step)

    def test_what_nobody_consumes_yet_does_not_keep_a_consumer_of_another_partition_waiting(self) -> None:
        queue = self.split(TRAIN, EVAL, capacity_rows=2)
        for uid in ("e0", "e1"):
            put_all(queue, uid)
        put_all(queue, "t0")  # nothing else can be trained on
        with refuses(DeadlineError, "3 of 2 held"):
            queue.put("t1", 0, [make_trajectory("t1", 0)], deadline_s=0)
        with refuses(DeadlineError, "3 of 2 held"):
            queue.put("e2", 0, [make_trajectory("e2", 0)], deadline_s=0)
        waiter = self.spawn(queue.lease, "train", groups=2, deadline_s=DEADLINE_S)
        put_all(queue, "t1")
        assert uids_of(waiter.result(DEADLINE_S)) == ["t0", "t1"]
        with refuses(DeadlineError, "4 of 2 held"):
            queue.put("e2", 0, [make_trajectory("e2", 0)], deadline_s=0)

    def test_a_producer_is_woken_by_room_that_another_partition_gives_back(self) -> None:
        queue = self.split(TRAIN, EVAL, capacity_rows=2)
        for uid in ("t0", "e0"):
            put_all(queue, uid)
        producer = self.spawn(put_all, queue, "e1")
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        producer.result(DEADLINE_S)

    def test_partitions_and_prompts_that_do_not_fit_are_refused(self) -> None:
        queue = self.split()
        for uid in ("t0", "e0"):
            put_all(queue, uid)
        with refuses(DataError, "'evla'", "['eval', 'train']"):
            queue.issue(prompts_of("x"), num_sessions=1, partition="evla")
        with refuses(DataError, "'evla'"):
            queue.claim(prompts=1, deadline_s=0, partition="evla")
        with refuses(DataError, "'evla'"):
            queue.forget_finished("evla")
        with refuses(DataError, "'t0' was issued before"):
            queue.issue(prompts_of("t0"), num_sessions=1, partition="eval")
        with refuses(DataError, "'e0' was issued to partition 'eval'", "'train' is of 'train'"):
            queue.lease("train", prompts=["t0", "e0"], deadline_s=DEADLINE_S)
        with refuses(DataError, "'t0' was issued to partition 'train'", "'eval' is of 'eval'"):
            queue.finish("eval", ["e0", "t0"])
        assert [entry.state for entry in queue.ledger()][:2] == ["settled", "settled"]
        assert len(queue.ledger()) == 6
