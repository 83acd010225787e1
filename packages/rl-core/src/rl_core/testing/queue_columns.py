# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of late columns: tasks that add what other tasks need."""

import numpy as np

from rl_core.errors import DataError, DeadlineError, ShapeError
from rl_core.queue.interface import TaskSpec
from rl_core.ragged import Ragged
from rl_core.testing.queue_checks import REFERENCE, TEACHER, TRAIN, TRAIN_LATE, QueueChecks, refuses, uids_of
from rl_core.testing.rows import make_prompts, make_trajectory, ragged_like

REWARD = TaskSpec(name="reward", needs=frozenset({"input_ids"}), gives=frozenset({"reward"}))


class ColumnChecks(QueueChecks):
    """A row is ready for a task when its columns are there."""

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

    def test_columns_stay_with_their_rows_when_tasks_take_groups_in_different_portions(self) -> None:
        train = TaskSpec(name="train", needs=frozenset({"reference_logprobs", "teacher_logprobs"}))
        queue = self.filled(REFERENCE, TEACHER, train, num_prompts=3)
        for task, portions in [("reference", (1, 2)), ("teacher", (2, 1))]:
            for num_groups in portions:
                lease = queue.lease(task, groups=num_groups, deadline_s=0)
                values = [-1.0 - int(key.prompt_uid[1:]) for key in lease.batch.keys]
                queue.ack(lease, {f"{task}_logprobs": ragged_like(lease.batch, f"{task}_logprobs", values)})
        batch = queue.lease("train", groups=3, deadline_s=0).batch
        for name in ("reference_logprobs", "teacher_logprobs"):
            assert [row[0] for row in batch.ragged(name)] == [-1.0, -2.0, -3.0]

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

    def test_a_refused_ack_changes_nothing_and_may_be_corrected(self) -> None:
        queue = self.filled(REFERENCE, TRAIN_LATE, num_prompts=1, num_sessions=2)
        lease = queue.lease("reference", groups=1, deadline_s=0)
        good = ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])
        with refuses(DataError, "gives ['reference_logprobs']", "found []"):
            queue.ack(lease)
        with refuses(DataError, "found ['teacher_logprobs']"):
            queue.ack(lease, {"teacher_logprobs": good})
        with refuses(DataError, "reference_logprobs", "'p0'", "token 0", "finite"):
            queue.ack(lease, {"reference_logprobs": Ragged(np.full_like(good.values, np.nan), good.offsets)})
        with refuses(ShapeError, "float32", "float64"):
            queue.ack(lease, {"reference_logprobs": Ragged(good.values.astype(np.float64), good.offsets)})
        with refuses(ShapeError, "2 rows", "found 1"):
            queue.ack(lease, {"reference_logprobs": good.select([0])})
        with refuses(ShapeError, "row 0", "5 tokens", "found 4"):
            shifted = Ragged(good.values, np.asarray([0, 4, 10]))
            queue.ack(lease, {"reference_logprobs": shifted})
        assert queue.ledger()[0].acked_by == frozenset()
        queue.ack(lease, {"reference_logprobs": good})
        assert queue.ledger()[0].acked_by == {"reference"}

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
