# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of room: bounds in bytes, and rows too large to travel with a message."""

import numpy as np

from rl_core.batch import Batch
from rl_core.errors import DataError, DeadlineError, OutdatedLeaseError
from rl_core.queue.interface import TaskSpec, TransferQueue
from rl_core.testing.queue_checks import DEADLINE_S, REFERENCE, TRAIN, QueueChecks, put_all, refuses, uids_of
from rl_core.testing.rows import make_prompts, make_trajectory, ragged_like

LARGE = 20_000
"""Tokens of a row whose columns are larger than what any backend sends inline."""


def put_large(queue: TransferQueue, uid: str, session: int = 0, *, deadline_s: float = DEADLINE_S) -> None:
    """Put a large row whose tokens name its prompt."""
    row = make_trajectory(uid, session, num_response_tokens=LARGE)
    row.input_ids[:] = int(uid[1:])
    queue.put(uid, session, [row], deadline_s=deadline_s)


class RoomChecks(QueueChecks):
    """Bytes are bounded and given back, and what a consumer looks at stays as it is."""

    def bounded(self, *tasks: TaskSpec, num_groups: float, num_prompts: int = 4) -> TransferQueue:
        """A queue for the bytes of so many groups of one row, two of them there."""
        one = self.filled(num_prompts=1).stats()["size_bytes"]
        queue = self.queue(*tasks, capacity_bytes=int(one * num_groups))
        queue.issue(make_prompts(num_prompts), num_sessions=1)
        for uid in ("p0", "p1"):
            put_all(queue, uid)
        return queue

    def test_a_producer_waits_for_bytes(self) -> None:
        queue = self.bounded(num_groups=2.5)
        held = int(queue.stats()["size_bytes"])
        with refuses(DeadlineError, "put of 1 rows", f"{held} of {int(held * 1.25)} bytes"):
            queue.put("p2", 0, [make_trajectory("p2", 0)], deadline_s=0)
        producer = self.spawn(put_all, queue, "p2")
        self.wait_for_stat(queue, "waiting/put", 1)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        producer.result(DEADLINE_S)
        assert queue.stats()["size_bytes"] == held

    def test_columns_that_tasks_give_take_room_and_never_wait_for_it(self) -> None:
        queue = self.bounded(REFERENCE, TRAIN, num_groups=3)
        before = queue.stats()["size_bytes"]
        lease = queue.lease("reference", groups=2, deadline_s=0)
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])})
        assert queue.stats()["size_bytes"] >= before + 2 * 5 * 4
        with refuses(DeadlineError, "bytes"):
            queue.put("p2", 0, [make_trajectory("p2", 0)], deadline_s=0)
        queue.ack(queue.lease("train", groups=2, deadline_s=0))
        assert queue.stats()["size_bytes"] == 0
        put_all(queue, "p2")

    def test_a_row_larger_than_the_queue_gets_through(self) -> None:
        queue = self.queue(TRAIN, capacity_bytes=1)
        queue.issue(make_prompts(2), num_sessions=1)
        put_all(queue, "p0")
        with refuses(DeadlineError, "of 1 bytes"):
            queue.put("p1", 0, [make_trajectory("p1", 0)], deadline_s=0)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        put_all(queue, "p1")
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p1"]

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

    def test_what_is_refused_keeps_no_room(self) -> None:
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
