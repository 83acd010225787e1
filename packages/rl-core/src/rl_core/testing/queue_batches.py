# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of puts that settle many sessions at once."""

import numpy as np

from rl_core.batch import Batch
from rl_core.columns import COLUMNS, column_dtype
from rl_core.errors import AlreadySettledError, DataError, DeadlineError
from rl_core.ragged import Ragged
from rl_core.row_keys import RowKey
from rl_core.testing.queue_checks import DEADLINE_S, TRAIN, QueueChecks, refuses, uids_of
from rl_core.testing.rows import make_prompts, make_trajectory, ragged_like


def batch_of(*keys: tuple[str, int, int]) -> Batch:
    """Rows with these keys, their reward the session's index."""
    return Batch.from_trajectories([make_trajectory(*key, reward=float(key[1])) for key in keys])


class BatchChecks(QueueChecks):
    """All sessions of a batch are settled, or none."""

    def test_a_batch_settles_many_groups(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(3), num_sessions=2)
        queue.put_batch(batch_of(("p2", 0, 0), ("p2", 1, 0), ("p0", 0, 0), ("p0", 1, 0), ("p0", 1, 1), ("p1", 1, 0)))
        assert [entry.sessions_settled for entry in queue.ledger()] == [2, 1, 2]
        assert [entry.num_rows for entry in queue.ledger()] == [3, 1, 2]
        lease = queue.lease("train", groups=2, deadline_s=0)
        assert uids_of(lease) == ["p2", "p0"]
        assert lease.batch.keys == (("p2", 0, 0), ("p2", 1, 0), ("p0", 0, 0), ("p0", 1, 0), ("p0", 1, 1))
        assert lease.batch.dense("reward").tolist() == [0, 1, 0, 1, 1]

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

    def test_sessions_of_a_group_may_come_in_several_batches(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=3)
        queue.put_batch(batch_of(("p0", 2, 0), ("p1", 0, 0)))
        queue.put_batch(batch_of(("p1", 2, 0), ("p0", 0, 0), ("p1", 1, 0)))
        queue.put("p0", 1, [make_trajectory("p0", 1, reward=1.0)])
        batch = queue.lease("train", groups=2, deadline_s=0).batch
        assert batch.keys == tuple((uid, session, 0) for uid in ("p1", "p0") for session in range(3))
        assert batch.dense("reward").tolist() == [0, 1, 2] * 2

    def test_a_batch_with_one_wrong_session_changes_nothing(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(4), num_sessions=2)
        queue.put("p1", 0, [make_trajectory("p1", 0)])
        queue.drop("p3", reason="too easy")
        before = (queue.ledger(), queue.stats()["rows"], queue.stats()["size_bytes"])
        good = ("p0", 0, 0)
        with refuses(AlreadySettledError, "session 0 of prompt 'p1' is already settled"):
            queue.put_batch(batch_of(good, ("p1", 1, 0), ("p1", 0, 0)))
        with refuses(DataError, "'p9' was never issued"):
            queue.put_batch(batch_of(good, ("p9", 0, 0)))
        with refuses(DataError, "'p3' is dropped (too easy)"):
            queue.put_batch(batch_of(good, ("p3", 0, 0)))
        with refuses(DataError, "sessions 0 to 1", "found session 2"):
            queue.put_batch(batch_of(good, ("p2", 2, 0)))
        assert (queue.ledger(), queue.stats()["rows"], queue.stats()["size_bytes"]) == before
        queue.put_batch(Batch((), {}))
        queue.put_batch(batch_of(good))
        assert queue.ledger()[0].sessions_settled == 1

    def test_values_that_are_not_finite_are_named_in_every_column(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=2)
        batch = batch_of(("p0", 0, 0), ("p0", 1, 0), ("p1", 1, 0))
        names = [name for name, spec in COLUMNS.items() if np.dtype(spec.dtype).kind == "f"]
        for name in names:
            if COLUMNS[name].is_ragged:
                good = ragged_like(batch, name, [0.5, 0.5, 0.5])
                values = good.values.copy()
                values[int(good.offsets[1]) + 3] = np.nan
                queue_refuses = refuses(DataError, name, "'p0', session 1, output 0", "token 3", "nan")
                bad: np.ndarray | Ragged = Ragged(values, good.offsets)
            else:
                bad = np.asarray([0, np.inf, 0], dtype=column_dtype(name))
                queue_refuses = refuses(DataError, name, "'p0', session 1, output 0", "inf")
            with queue_refuses:
                queue.put_batch(batch.with_columns({name: bad}))
        assert [entry.sessions_settled for entry in queue.ledger()] == [0, 0]
        assert (queue.stats()["rows"], queue.stats()["rows/reserved"]) == (0, 0)

    def test_columns_that_nobody_knows_are_refused(self) -> None:
        with refuses(DataError, "unknown column 'logprobs'", "rollout_logprobs"):
            Batch([RowKey("p0", 0, 0)], {"logprobs": np.zeros(1, dtype=np.float32)})

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

    def test_a_batch_waits_for_room_as_a_whole(self) -> None:
        queue = self.queue(TRAIN, capacity_rows=3)
        queue.issue(make_prompts(4), num_sessions=1)
        queue.put_batch(batch_of(("p0", 0, 0), ("p1", 0, 0)))
        more = batch_of(("p2", 0, 0), ("p3", 0, 0))
        with refuses(DeadlineError, "put of 2 rows", "2 of 3 held"):
            queue.put_batch(more, deadline_s=0)
        assert [entry.sessions_settled for entry in queue.ledger()] == [1, 1, 0, 0]
        producer = self.spawn(queue.put_batch, more, deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        producer.result(DEADLINE_S)
        assert uids_of(queue.lease("train", groups=3, deadline_s=0)) == ["p1", "p2", "p3"]

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
