"""Checks of rows and columns: any width, user-defined columns, and late ones."""

import numpy as np

from queue_conformance.tools import OWN, TEACHER, TOP_K, declared
from rl_core.data.batch import Batch, Column
from rl_core.data.columns import column_dtype
from rl_core.data.ragged import Ragged
from rl_core.errors import ShapeError
from rl_core.queue.interface import TaskSpec
from rl_core.testing.fixtures import make_prompts, make_trajectory, ragged_like
from rl_core.testing.queue_checks import REFERENCE, QueueChecks, refuses, uids_of

TOP_TEACHER = TaskSpec(
    name="teacher", needs=frozenset({"input_ids"}), gives=frozenset({"own_top_logprobs", "own_top_ids"})
)
DISTILL = TaskSpec(name="distill", needs=frozenset({"own_top_logprobs", "own_top_ids"}))


def top_of(batch: Batch) -> dict[str, Column]:
    """Return [T, K] values that encode row, token and rank."""
    rows = []
    for key, ids in zip(batch.keys, batch.ragged("input_ids"), strict=True):
        first = 1000 * int(key.prompt_uid[1:]) + 100 * key.session_index
        rows.append(first + np.arange(len(ids) * TOP_K).reshape(len(ids), TOP_K))
    return {
        "own_top_logprobs": Ragged.from_rows([-row for row in rows], dtype=np.float32),
        "own_top_ids": Ragged.from_rows(rows, dtype=np.int32),
    }


class RowChecks(QueueChecks):
    """Rows come out with the columns that producers and tasks gave them."""

    def test_rows_of_a_batch_may_be_in_any_order(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=2)
        keys = [("p1", 1, 0), ("p0", 1, 1), ("p1", 0, 0), ("p0", 0, 0), ("p0", 1, 0)]
        rows = [make_trajectory(*key, num_response_tokens=2 + i, extras={"i": i}) for i, key in enumerate(keys)]
        queue.put_batch(Batch.from_trajectories(rows))
        batch = queue.lease("train", groups=2, deadline_s=0).batch
        expected = [2, 0, 3, 4, 1]
        assert batch.keys == tuple(keys[i] for i in expected)
        assert batch.ragged("input_ids").lengths.tolist() == [4 + i for i in expected]
        assert [extras["i"] for extras in batch.extras] == expected

    def test_several_values_a_token_reach_the_task_that_needs_them(self) -> None:
        with declared():
            queue = self.queue(TOP_TEACHER, DISTILL)
            queue.issue(make_prompts(3), num_sessions=2)
            for uid in ("p2", "p0", "p1"):
                for session in (1, 0):
                    row = make_trajectory(uid, session, num_response_tokens=int(uid[1:]) + 2)
                    queue.put(uid, session, [row])
            for portion in (1, 2):
                lease = queue.lease("teacher", groups=portion, deadline_s=0)
                queue.ack(lease, top_of(lease.batch))
            batch = queue.lease("distill", groups=3, deadline_s=0).batch
            expected = top_of(batch)
            for name in ("own_top_logprobs", "own_top_ids"):
                column = batch.ragged(name)
                assert column.values.shape[1:] == (TOP_K,)
                for found, wanted in zip(column, expected[name], strict=True):
                    assert found.tolist() == wanted.tolist()

    def test_indices_of_a_token_reach_the_task_that_needs_them(self) -> None:
        queue = self.queue(TaskSpec(name="train", needs=frozenset({"routed_experts", "nucleus_ids"})))
        queue.issue(make_prompts(1), num_sessions=2)
        experts = np.arange(20, dtype=np.int16).reshape(5, 2, 2)
        nuclei = np.arange(15, dtype=np.int32).reshape(5, 3)
        for session in (1, 0):
            row = make_trajectory("p0", session, routed_experts=experts + session, nucleus_ids=nuclei + session)
            queue.put("p0", session, [row])
        batch = queue.lease("train", groups=1, deadline_s=0).batch
        for session in range(2):
            assert batch.ragged("routed_experts")[session].tolist() == (experts + session).tolist()
            assert batch.ragged("nucleus_ids")[session].tolist() == (nuclei + session).tolist()

    def test_producers_may_put_columns_of_their_own(self) -> None:
        with declared():
            queue = self.queue()
            queue.issue(make_prompts(2), num_sessions=2)
            rows = [make_trajectory(uid, session) for uid in ("p0", "p1") for session in (1, 0)]
            batch = Batch.from_trajectories(rows)
            embedding = np.arange(12, dtype=np.float16).reshape(4, 3)
            queue.put_batch(batch.with_columns({**top_of(batch), "own_embedding": embedding}))
            found = queue.lease("train", groups=2, deadline_s=0).batch
            assert found.dense("own_embedding").tolist() == embedding[[1, 0, 3, 2]].tolist()
            assert found.ragged("own_top_ids").values.tolist() == top_of(found)["own_top_ids"].values.tolist()  # type: ignore[union-attr]

    def test_a_lease_of_rows_that_do_not_fit_together_is_given_back(self) -> None:
        for name, shape in (("own_top_logprobs", (5,)), ("own_embedding", (1,))):
            with declared():
                queue = self.queue()
                queue.issue(make_prompts(2), num_sessions=1)
                for width, uid in ((2, "p0"), (3, "p1")):
                    values = np.zeros((*shape, width), dtype=column_dtype(name))
                    column = Ragged(values, np.asarray([0, 5])) if OWN[name].is_ragged else values
                    queue.put_batch(Batch.from_trajectories([make_trajectory(uid, 0)]).with_columns({name: column}))
                with refuses(ShapeError, "(2,)", "(3,)"):
                    queue.lease("train", groups=2, deadline_s=0)
                assert queue.stats()["leases"] == 0
                assert [uids_of(queue.lease("train", groups=1, deadline_s=0)) for _ in range(2)] == [["p0"], ["p1"]]

    def test_late_columns_fit_groups_that_came_in_one_part_or_in_several(self) -> None:
        train = TaskSpec(name="train", needs=frozenset({"reference_logprobs", "teacher_logprobs"}))
        queue = self.queue(REFERENCE, TEACHER, train)
        queue.issue(make_prompts(4), num_sessions=3)
        rows = [make_trajectory(uid, session) for uid in ("p3", "p1") for session in (2, 1, 0)]
        queue.put_batch(Batch.from_trajectories(rows))
        for session in (1, 2, 0):
            queue.put("p2", session, [make_trajectory("p2", session)])
        queue.put_batch(Batch.from_trajectories([make_trajectory("p0", session) for session in (2, 0)]))
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        for task, portions in (("teacher", (3, 1)), ("reference", (1, 2, 1))):
            for portion in portions:
                lease = queue.lease(task, groups=portion, deadline_s=0)
                column = f"{task}_logprobs"
                queue.ack(lease, {column: ragged_like(lease.batch, column, values_of(lease.batch))})
        lease = queue.lease("train", groups=4, deadline_s=0)
        assert uids_of(lease) == ["p3", "p1", "p2", "p0"]
        for name in ("teacher_logprobs", "reference_logprobs"):
            assert [float(row[0]) for row in lease.batch.ragged(name)] == values_of(lease.batch)


def values_of(batch: Batch) -> list[float]:
    """Return a value per row that identifies the row."""
    return [-float(key.prompt_uid[1:]) - key.session_index / 4 for key in batch.keys]
