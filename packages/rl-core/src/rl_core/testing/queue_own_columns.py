# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of columns that a program declares, of several values a token or row, and of late ones on joined groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rl_core.batch import Batch, Column
from rl_core.columns import COLUMNS, ColumnSpec, column_dtype, declare_column
from rl_core.errors import DataError, ShapeError
from rl_core.queue.interface import TaskSpec, TransferQueue
from rl_core.ragged import Ragged
from rl_core.testing.queue_checks import REFERENCE, TEACHER, QueueChecks, put_all, refuses, uids_of
from rl_core.testing.rows import make_prompts, make_trajectory, ragged_like

TOP_K = 4
OWN = {
    "own_top_logprobs": ColumnSpec(dtype="float32", is_ragged=True, meaning="The teacher's largest logprobs."),
    "own_top_ids": ColumnSpec(dtype="int32", is_ragged=True, meaning="The tokens of these."),
    "own_embedding": ColumnSpec(dtype="float16", is_ragged=False, meaning="A few numbers of each row."),
}
TOP_TEACHER = TaskSpec(
    name="teacher", needs=frozenset({"input_ids"}), gives=frozenset({"own_top_logprobs", "own_top_ids"})
)
DISTILL = TaskSpec(name="distill", needs=frozenset({"own_top_logprobs", "own_top_ids"}))
REWARD = TaskSpec(name="reward", needs=frozenset({"input_ids"}), gives=frozenset({"reward"}))
SCORED = TaskSpec(name="train", needs=frozenset({"input_ids", "reward"}))


@contextmanager
def declared() -> Iterator[None]:
    """Declare columns for one check."""
    for name, spec in OWN.items():
        declare_column(name, spec)
    try:
        yield
    finally:
        for name in OWN:
            COLUMNS.pop(name, None)


def top_of(batch: Batch) -> dict[str, Column]:
    """[T, K] values that say to which row, token and rank they belong."""
    rows = []
    for key, ids in zip(batch.keys, batch.ragged("input_ids"), strict=True):
        first = 1000 * int(key.prompt_uid[1:]) + 100 * key.session_index
        rows.append(first + np.arange(len(ids) * TOP_K).reshape(len(ids), TOP_K))
    return {
        "own_top_logprobs": Ragged.from_rows([-row for row in rows], dtype=np.float32),
        "own_top_ids": Ragged.from_rows(rows, dtype=np.int32),
    }


class OwnColumnChecks(QueueChecks):
    """Columns of any program, of any width, stay with their rows."""

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

    def test_the_token_of_a_wide_column_is_named(self) -> None:
        with declared():
            queue = self.queue()
            queue.issue(make_prompts(1), num_sessions=1)
            batch = Batch.from_trajectories([make_trajectory("p0", 0)])
            bad = np.zeros((5, TOP_K), dtype=np.float32)
            bad[3, 1] = np.nan
            with refuses(DataError, "own_top_logprobs", "'p0', session 0, output 0", "token 3", "nan"):
                queue.put_batch(batch.with_columns({"own_top_logprobs": Ragged(bad, np.asarray([0, 5]))}))
            embedding = np.asarray([[0, np.inf]], dtype=np.float16)
            with refuses(DataError, "own_embedding", "'p0', session 0, output 0", "inf"):
                queue.put_batch(batch.with_columns({"own_embedding": embedding}))
            assert queue.ledger()[0].sessions_settled == 0

    def test_late_columns_fit_groups_that_came_in_one_part_or_in_several(self) -> None:
        train = TaskSpec(name="train", needs=frozenset({"reference_logprobs", "teacher_logprobs"}))
        queue = self.queue(REFERENCE, TEACHER, train)
        queue.issue(make_prompts(4), num_sessions=3)
        rows = [make_trajectory(uid, session) for uid in ("p3", "p1") for session in (2, 1, 0)]
        queue.put_batch(Batch.from_trajectories(rows))
        for session in (1, 2, 0):
            put_one(queue, "p2", session)
        queue.put_batch(Batch.from_trajectories([make_trajectory("p0", session) for session in (2, 0)]))
        put_one(queue, "p0", 1)
        for task, portions in (("teacher", (3, 1)), ("reference", (1, 2, 1))):
            for portion in portions:
                lease = queue.lease(task, groups=portion, deadline_s=0)
                column = f"{task}_logprobs"
                queue.ack(lease, {column: ragged_like(lease.batch, column, values_of(lease.batch))})
        lease = queue.lease("train", groups=4, deadline_s=0)
        assert uids_of(lease) == ["p3", "p1", "p2", "p0"]
        for name in ("teacher_logprobs", "reference_logprobs"):
            assert [float(row[0]) for row in lease.batch.ragged(name)] == values_of(lease.batch)

    def test_a_column_may_come_from_the_producer_for_some_groups_and_from_a_task_for_others(self) -> None:
        queue = self.queue(REWARD, SCORED)
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
        queue = self.queue(REWARD, SCORED)
        queue.issue(make_prompts(1), num_sessions=1)
        put_all(queue, "p0")
        assert queue.lease("train", groups=1, deadline_s=0, lease_s=10).batch.dense("reward").tolist() == [1.0]
        lease = queue.lease("reward", groups=1, deadline_s=0)
        queue.ack(lease, {"reward": np.asarray([0.5], dtype=np.float32)})
        self.advance(queue, 10)
        assert queue.lease("train", groups=1, deadline_s=0).batch.dense("reward").tolist() == [0.5]


def put_one(queue: TransferQueue, uid: str, session: int) -> None:
    """Put one row of one session."""
    queue.put(uid, session, [make_trajectory(uid, session)])


def values_of(batch: Batch) -> list[float]:
    """A value for each row that says which row it is."""
    return [-float(key.prompt_uid[1:]) - key.session_index / 4 for key in batch.keys]
