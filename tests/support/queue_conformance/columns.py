"""Checks of late columns: tasks that add what other tasks need."""

import numpy as np

from queue_conformance.tools import REWARD, TEACHER, TRAIN_LATE, batch_of
from rl_core.errors import DeadlineError
from rl_core.testing.fixtures import make_prompts, make_trajectory, ragged_like
from rl_core.testing.queue_checks import REFERENCE, TRAIN, QueueChecks, put_all, refuses, uids_of


class ColumnChecks(QueueChecks):
    """A row is ready for a task once its columns exist."""

    def test_a_late_column_reaches_the_task_that_needs_it(self) -> None:
        queue = self.filled(REFERENCE, TRAIN_LATE, num_prompts=2, num_sessions=2)
        with refuses(DeadlineError, "2 groups lack columns ['reference_logprobs']"):
            queue.lease("train", groups=1, deadline_s=0)
        lease = queue.lease("reference", groups=2, deadline_s=0)
        given = ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0, -3.0, -4.0])
        queue.ack(lease, {"reference_logprobs": given})
        first, second = (queue.lease("train", groups=1, deadline_s=0).batch for _ in range(2))
        assert [row[0] for row in first.ragged("reference_logprobs")] == [-1.0, -2.0]
        assert [row[0] for row in second.ragged("reference_logprobs")] == [-3.0, -4.0]
        assert second.ragged("reference_logprobs").lengths.tolist() == second.ragged("input_ids").lengths.tolist()

    def test_groups_that_differ_in_columns_of_other_tasks_are_leased_together(self) -> None:
        queue = self.filled(REFERENCE, TEACHER, TRAIN, num_prompts=2)
        lease = queue.lease("reference", groups=1, deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0])})
        alone = queue.lease("teacher", groups=1, deadline_s=0)
        queue.release(alone)
        together = queue.lease("teacher", groups=2, deadline_s=0)
        assert (uids_of(alone), uids_of(together)) == (["p0"], ["p0", "p1"])
        assert alone.batch.names == together.batch.names
        assert "reference_logprobs" not in together.batch

    def test_a_row_without_reward_waits_for_the_task_that_scores_it(self) -> None:
        queue = self.queue(REWARD, TRAIN)
        queue.issue(make_prompts(1), num_sessions=2)
        queue.put("p0", 0, [make_trajectory("p0", 0, reward=1.0)])
        queue.put("p0", 1, [make_trajectory("p0", 1, reward=None)])
        with refuses(DeadlineError, "1 groups lack columns ['reward']"):
            queue.lease("train", groups=1, deadline_s=0)
        lease = queue.lease("reward", groups=1, deadline_s=0)
        queue.ack(lease, {"reward": np.asarray([0.25, 0.75], dtype=np.float32)})
        assert queue.lease("train", groups=1, deadline_s=0).batch.dense("reward").tolist() == [0.25, 0.75]

    def test_columns_of_an_outdated_lease_are_not_kept(self) -> None:
        queue = self.filled(REFERENCE, TRAIN_LATE, num_prompts=1)
        old = queue.lease("reference", groups=1, deadline_s=0, lease_s=10)
        self.advance(queue, 11)
        new = queue.lease("reference", groups=1, deadline_s=0)
        queue.ack(new, {"reference_logprobs": ragged_like(new.batch, "reference_logprobs", [-2.0])})
        with refuses(RuntimeError, f"lease {old.lease_id}"):
            queue.ack(old, {"reference_logprobs": ragged_like(old.batch, "reference_logprobs", [-1.0])})
        batch = queue.lease("train", groups=1, deadline_s=0).batch
        assert batch.ragged("reference_logprobs")[0].tolist() == [-2.0] * 5

    def test_a_group_has_the_columns_that_all_its_rows_have(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=2)
        first, second = batch_of(("p0", 0, 0)), batch_of(("p0", 1, 0))
        both = {"values": ragged_like(first, "values", [0.5])}
        queue.put_batch(first.with_columns({**both, "returns": ragged_like(first, "returns", [1.5])}))
        queue.put_batch(second.with_columns(both))
        batch = queue.lease("train", groups=1, deadline_s=0).batch
        assert [row[0] for row in batch.ragged("values")] == [0.5, 0.5]
        assert "returns" not in batch

    def test_a_column_may_come_from_the_producer_for_some_groups_and_from_a_task_for_others(self) -> None:
        queue = self.queue(REWARD, TRAIN)
        queue.issue(make_prompts(3), num_sessions=2)
        for uid in ("p1", "p0", "p2"):
            for session in (1, 0):
                reward = None if uid == "p1" else 10.0 * int(uid[1:]) + session
                queue.put(uid, session, [make_trajectory(uid, session, reward=reward)])
        lease = queue.lease("reward", groups=1, deadline_s=0)
        assert uids_of(lease) == ["p1"]
        queue.ack(lease, {"reward": np.asarray([0.25, 0.75], dtype=np.float32)})
        batch = queue.lease("train", groups=3, deadline_s=0).batch
        assert batch.dense("reward").tolist() == [0.25, 0.75, 0.0, 1.0, 20.0, 21.0]

    def test_a_late_column_replaces_that_of_the_producer(self) -> None:
        queue = self.queue(REWARD, TRAIN)
        queue.issue(make_prompts(1), num_sessions=1)
        put_all(queue, "p0")
        assert queue.lease("train", groups=1, deadline_s=0, lease_s=10).batch.dense("reward").tolist() == [1.0]
        lease = queue.lease("reward", groups=1, deadline_s=0)
        queue.ack(lease, {"reward": np.asarray([0.5], dtype=np.float32)})
        self.advance(queue, 10)
        assert queue.lease("train", groups=1, deadline_s=0).batch.dense("reward").tolist() == [0.5]
