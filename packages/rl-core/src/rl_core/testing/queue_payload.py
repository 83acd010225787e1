# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Conformance checks: rows and columns of any size and width are transported unchanged."""

import numpy as np

from rl_core.data.batch import Batch, Column
from rl_core.data.columns import column_dtype
from rl_core.data.ragged import Ragged
from rl_core.errors import DataError, OutdatedLeaseError, ShapeError
from rl_core.queue.interface import TaskSpec
from rl_core.testing.queue_checks import (
    DEADLINE_S,
    LARGE,
    OWN,
    REFERENCE,
    TEACHER,
    TOP_K,
    TRAIN,
    TRAIN_IN_ORDER,
    QueueChecks,
    declared,
    put_large,
    refuses,
    uids_of,
)
from rl_core.testing.rows import make_prompts, make_trajectory, ragged_like

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


class PayloadChecks(QueueChecks):
    """Checks that rows are delivered completely, in order, and unchanged while a view exists."""

    def test_rows_come_out_as_they_went_in(self) -> None:
        queue = self.queue(TRAIN_IN_ORDER)
        queue.issue(make_prompts(2), num_sessions=2)
        for uid, session in [("p1", 1), ("p0", 1), ("p1", 0), ("p0", 0)]:
            queue.put(uid, session, [make_trajectory(uid, session, reward=10.0 * session, extras={"from": uid})])
        lease = queue.lease("train", groups=2, deadline_s=0)
        assert uids_of(lease) == ["p0", "p1"]
        assert lease.batch.keys == (("p0", 0, 0), ("p0", 1, 0), ("p1", 0, 0), ("p1", 1, 0))
        assert [row.tolist() for row in lease.batch.ragged("input_ids")] == [[1, 2, 0, 0, 0], [1, 2, 1, 0, 0]] * 2
        assert lease.batch.dense("reward").tolist() == [0.0, 10.0, 0.0, 10.0]
        assert [extras["from"] for extras in lease.batch.extras] == ["p0", "p0", "p1", "p1"]
        queue.ack(lease)
        assert [entry.state for entry in queue.ledger()] == ["done", "done"]

    def test_a_session_may_give_several_rows_or_none(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=3)
        queue.put("p0", 2, [make_trajectory("p0", 2, output) for output in (1, 0)])
        queue.put("p0", 0, [])
        queue.put("p0", 1, [make_trajectory("p0", 1, num_response_tokens=7)])
        lease = queue.lease("train", groups=1, deadline_s=0)
        assert lease.batch.keys == (("p0", 1, 0), ("p0", 2, 0), ("p0", 2, 1))
        assert lease.batch.ragged("input_ids").lengths.tolist() == [9, 5, 5]

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

    def test_a_batch_of_a_thousand_rows_comes_out_as_it_went_in(self) -> None:
        num_prompts, num_sessions = 125, 8
        queue = self.queue()
        queue.issue(make_prompts(num_prompts), num_sessions=num_sessions)
        keys = [(f"p{p}", session, 0) for p in range(num_prompts) for session in range(num_sessions)]
        rows = [make_trajectory(*key, num_response_tokens=1 + i % 7, reward=float(i)) for i, key in enumerate(keys)]
        order = np.random.default_rng(0).permutation(len(rows))
        queue.put_batch(Batch.from_trajectories([rows[i] for i in order]), deadline_s=DEADLINE_S)
        lease = queue.lease("train", groups=num_prompts, deadline_s=DEADLINE_S)
        found = dict(zip(map(tuple, lease.batch.keys), lease.batch.dense("reward").tolist(), strict=True))
        assert found == {key: float(i) for i, key in enumerate(keys)}
        queue.ack(lease)
        assert queue.stats()["groups/done"] == num_prompts

    def test_large_rows_come_out_as_they_went_in(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(3), num_sessions=2)
        for uid, session in [("p1", 1), ("p0", 0), ("p1", 0), ("p0", 1)]:
            put_large(queue, uid, session)
        rows = [make_trajectory("p2", session, num_response_tokens=LARGE) for session in (1, 0)]
        queue.put_batch(Batch.from_trajectories(rows))
        lease = queue.lease("train", groups=3, deadline_s=0)
        assert uids_of(lease) == ["p1", "p0", "p2"]
        ids = lease.batch.ragged("input_ids")
        assert ids.lengths.tolist() == [LARGE + 2] * 6
        assert [int(row[-1]) for row in ids] == [1, 1, 0, 0, 0, 0]
        assert [int(row[2]) for row in ids] == [1, 1, 0, 0, 0, 1]
        assert (lease.batch.ragged("rollout_logprobs").values == np.float32(-0.5)).sum() == 6 * LARGE
        queue.ack(lease)
        assert queue.stats()["size_bytes"] == 0

    def test_rows_that_are_looked_at_stay_while_others_come_and_go(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(8), num_sessions=1)
        held = []
        for index in range(8):
            put_large(queue, f"p{index}")
            lease = queue.lease("train", groups=1, deadline_s=0)
            held.append(lease.batch.ragged("input_ids")[0])
            queue.ack(lease)
            del lease
            if index % 3 == 2:
                held[index - 1] = held[index - 1].copy()  # lets go of the row itself
        assert [(int(row.min()), int(row.max())) for row in held] == [(index, index) for index in range(8)]

    def test_large_columns_that_tasks_give_reach_others(self) -> None:
        train = TaskSpec(name="train", needs=frozenset({"reference_logprobs"}))
        queue = self.queue(REFERENCE, train)
        queue.issue(make_prompts(3), num_sessions=1)
        for index in range(3):
            put_large(queue, f"p{index}")
        for portion in (2, 1):
            lease = queue.lease("reference", groups=portion, deadline_s=0)
            values = [-1.0 - int(uid[1:]) for uid in uids_of(lease)]
            queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", values)})
        batch = queue.lease("train", groups=3, deadline_s=0).batch
        assert [(float(row.min()), float(row.max())) for row in batch.ragged("reference_logprobs")] == [
            (-1.0, -1.0),
            (-2.0, -2.0),
            (-3.0, -3.0),
        ]

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

    def test_what_is_refused_keeps_no_capacity(self) -> None:
        queue = self.queue(REFERENCE, TRAIN)
        queue.issue(make_prompts(1), num_sessions=1)
        put_large(queue, "p0")
        with refuses(DataError, "already settled"):
            put_large(queue, "p0")
        lease = queue.lease("reference", groups=1, deadline_s=0, lease_s=10)
        given = {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0])}
        held = queue.stats()["size_bytes"]
        self.advance(queue, 11)
        for _ in range(2):
            with refuses(OutdatedLeaseError, f"lease {lease.lease_id}"):
                queue.ack(lease, given)
        stats = queue.stats()
        assert (stats["size_bytes"], stats["rows/reserved"], stats["size_bytes/reserved"]) == (held, 0, 0)


def values_of(batch: Batch) -> list[float]:
    """Return a value per row that identifies the row."""
    return [-float(key.prompt_uid[1:]) - key.session_index / 4 for key in batch.keys]
