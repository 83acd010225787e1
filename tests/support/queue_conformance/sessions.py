"""Checks of a prompt's states: issued, its sessions settled once, dropped, reissued."""

import numpy as np

from queue_conformance.tools import OWN, TOP_K, batch_of, declared
from rl_core.data.batch import Batch
from rl_core.data.columns import COLUMNS, column_dtype
from rl_core.data.ragged import Ragged
from rl_core.data.row_keys import RowKey
from rl_core.errors import AlreadySettledError, DataError, DeadlineError, NothingToLeaseError, OutdatedLeaseError
from rl_core.testing.fixtures import make_prompts, make_trajectory, ragged_like
from rl_core.testing.queue_checks import REFERENCE, TRAIN, QueueChecks, put_all, refuses, uids_of


class SessionChecks(QueueChecks):
    """Groups are delivered whole; rows of an earlier attempt do not count."""

    def test_half_a_group_is_not_delivered(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=3)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        with refuses(DeadlineError, "has lacked sessions [0, 2]"):
            queue.lease("train", groups=1, deadline_s=0)
        queue.put("p0", 0, [make_trajectory("p0", 0)])
        queue.put("p0", 2, [make_trajectory("p0", 2)])
        assert len(queue.lease("train", groups=1, deadline_s=0).batch) == 3

    def test_a_group_without_its_failed_sessions_is_delivered(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=2)
        queue.fail("p0", 0, reason="sandbox timed out")
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        assert queue.lease("train", groups=1, deadline_s=0).batch.keys == (("p0", 1, 0),)
        assert queue.ledger()[0].sessions_failed == {0: "sandbox timed out"}

    def test_a_prompt_without_any_row_is_dropped(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=2)
        for session, reason in enumerate(("sandbox timed out", "engine aborted")):
            queue.fail("p0", session, reason=reason)
            queue.put("p1", session, [])
        assert [(entry.state, entry.reason) for entry in queue.ledger()] == [
            ("dropped", "no rows: engine aborted; sandbox timed out"),
            ("dropped", "no rows: its sessions returned no trajectories"),
        ]
        with refuses(NothingToLeaseError, "2 dropped"):
            queue.lease("train", groups=1, deadline_s=0)

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

    def test_sessions_of_a_group_may_come_in_several_batches(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=3)
        queue.put_batch(batch_of(("p0", 2, 0), ("p1", 0, 0)))
        queue.put_batch(batch_of(("p1", 2, 0), ("p0", 0, 0), ("p1", 1, 0)))
        queue.put("p0", 1, [make_trajectory("p0", 1, reward=1.0)])
        batch = queue.lease("train", groups=2, deadline_s=0).batch
        assert batch.keys == tuple((uid, session, 0) for uid in ("p1", "p0") for session in range(3))
        assert batch.dense("reward").tolist() == [0, 1, 2] * 2

    def test_a_session_is_settled_once(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=3)
        queue.put("p0", 0, [make_trajectory("p0", 0)])
        queue.fail("p0", 1, reason="engine aborted")
        for session in (0, 1):
            with refuses(DataError, f"session {session} of prompt 'p0' is already settled"):
                queue.put("p0", session, [make_trajectory("p0", session)])
            with refuses(DataError, f"session {session} of prompt 'p0' is already settled"):
                queue.fail("p0", session, reason="again")
        assert queue.ledger()[0].sessions_settled == 2

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
        with refuses(DataError, "sessions 0 to 1", "found session -1"):
            queue.put("p2", -1, [make_trajectory("p2", -1)])
        assert (queue.ledger(), queue.stats()["rows"], queue.stats()["size_bytes"]) == before
        queue.put_batch(Batch((), {}))
        queue.put_batch(batch_of(good))
        assert queue.ledger()[0].sessions_settled == 1

    def test_rows_of_another_session_are_refused(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=2)
        for found in (make_trajectory("p1", 0), make_trajectory("p0", 1)):
            with refuses(DataError, "trajectory 0", f"{found.prompt_uid!r}"):
                queue.put("p0", 0, [found])
        with refuses(DataError, "unique output indices"):
            queue.put("p0", 0, [make_trajectory("p0", 0, 1), make_trajectory("p0", 0, 1)])

    def test_values_that_are_not_finite_are_refused_and_named(self) -> None:
        with declared():
            queue = self.queue()
            queue.issue(make_prompts(2), num_sessions=2)
            batch = batch_of(("p0", 0, 0), ("p0", 1, 0), ("p1", 1, 0))
            names = [name for name, spec in COLUMNS.items() if np.dtype(spec.dtype).kind == "f"]
            assert set(names) & set(OWN)
            for name in names:
                bad: np.ndarray | Ragged = np.asarray([0, np.inf, 0], dtype=column_dtype(name))
                words = ["inf"]
                if COLUMNS[name].is_ragged:
                    good, has_several = ragged_like(batch, name, [0.5, 0.5, 0.5]), COLUMNS[name].value_axes == 1
                    values = np.stack([good.values] * (TOP_K if has_several else 1), axis=1)
                    values[int(good.offsets[1]) + 3, -1] = np.nan
                    bad, words = Ragged(values if has_several else values[:, 0], good.offsets), ["token 3", "nan"]
                with refuses(DataError, name, "'p0', session 1, output 0", *words):
                    queue.put_batch(batch.with_columns({name: bad}))
            for value in (np.nan, np.inf, -np.inf):
                with refuses(DataError, "reward", "output 1", "finite"):
                    queue.put("p0", 0, [make_trajectory("p0", 0), make_trajectory("p0", 0, 1, reward=float(value))])
            assert [entry.sessions_settled for entry in queue.ledger()] == [0, 0]
            assert (queue.stats()["rows"], queue.stats()["rows/reserved"]) == (0, 0)

    def test_a_prompt_is_issued_once_and_a_bad_issue_enters_none(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=1)
        with refuses(DataError, "'p0' was already issued"):
            queue.issue(list(reversed(make_prompts(2))), num_sessions=1)
        with refuses(DataError, "'p0' was already issued"):
            queue.issue(make_prompts(1) * 2, num_sessions=1)
        with refuses(DataError, "num_sessions", "found 0"):
            queue.issue(make_prompts(3)[2:], num_sessions=0)
        assert [entry.prompt_uid for entry in queue.ledger()] == ["p0"]

    def test_what_is_done_or_dropped_takes_nothing_more(self) -> None:
        queue = self.filled(num_prompts=3)
        queue.issue(make_prompts(4)[3:], num_sessions=1)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        queue.drop("p1", reason="too easy")
        queue.drop("p3", reason="too long")
        with refuses(DataError, "'p0' is done"):
            queue.drop("p0", reason="late")
        with refuses(ValueError, "'p1' is dropped (too easy)"):
            queue.drop("p1", reason="again", reissue=True)
        with refuses(DataError, "'p1' is dropped", "too easy"):
            put_all(queue, "p1")
        assert [(entry.state, entry.reason, entry.attempt) for entry in queue.ledger()] == [
            ("done", None, 1),
            ("dropped", "too easy", 1),
            ("settled", None, 1),
            ("dropped", "too long", 1),
        ]
        assert queue.unsettled() == []
        assert uids_of(queue.lease("train", groups=3, deadline_s=0, allow_fewer=True)) == ["p2"]

    def test_a_prompt_is_issued_again_with_an_attempt_more(self) -> None:
        queue = self.filled(num_prompts=2, num_sessions=2)
        for attempt in (2, 3):
            queue.drop("p0", reason="sandbox broke: disk", reissue=True)
            entry = queue.ledger()[0]
            assert (entry.state, entry.attempt, entry.reason) == ("issued", attempt, "sandbox broke: disk")
            assert (entry.sessions_settled, entry.num_rows, entry.num_tokens) == (0, 0, 0)
        assert (queue.stats()["reissued"], queue.stats()["drops/sandbox broke"], queue.stats()["rows"]) == (2, 2, 2)
        for session in range(2):
            queue.put("p0", session, [make_trajectory("p0", session, num_response_tokens=7)])
        lease = queue.lease("train", groups=2, deadline_s=0)
        lengths = dict(zip(lease.batch.keys, lease.batch.ragged("input_ids").lengths.tolist(), strict=True))
        assert [lengths[RowKey("p0", session, 0)] for session in range(2)] == [9, 9]
        queue.ack(lease)
        assert [(entry.state, entry.attempt) for entry in queue.ledger()] == [("done", 3), ("done", 1)]

    def test_failed_sessions_of_the_last_attempt_are_open_again(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=2)
        queue.fail("p0", 0, reason="engine aborted")
        queue.drop("p0", reason="engine broke", reissue=True)
        assert queue.unsettled()[0].sessions == (0, 1)
        put_all(queue, "p0", num_sessions=2)
        assert queue.ledger()[0].sessions_failed == {}

    def test_acks_of_the_last_attempt_are_outdated(self) -> None:
        queue = self.filled(num_prompts=2)
        lease = queue.lease("train", groups=2, deadline_s=0)
        queue.drop("p0", reason="too easy", reissue=True)
        put_all(queue, "p0")
        with refuses(OutdatedLeaseError, f"lease {lease.lease_id}", "'p0' was dropped: too easy"):
            queue.ack(lease)
        queue.release(lease)
        again = queue.lease("train", groups=2, deadline_s=0)
        assert sorted(uids_of(again)) == ["p0", "p1"]
        queue.ack(again)
        assert [entry.state for entry in queue.ledger()] == ["done", "done"]

    def test_a_prompt_that_was_issued_again_arrives_anew(self) -> None:
        queue = self.filled(num_prompts=3)
        queue.drop("p0", reason="too easy", reissue=True)
        put_all(queue, "p0")
        queue.drop("p1", reason="too easy", reissue=True)
        put_all(queue, "p1")
        assert uids_of(queue.lease("train", groups=3, deadline_s=0)) == ["p2", "p0", "p1"]

    def test_a_task_that_gave_columns_gives_them_again_and_one_that_took_rows_is_done(self) -> None:
        queue = self.filled(REFERENCE, TRAIN, num_prompts=2)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        queue.drop("p0", reason="lost", reissue=True)
        assert queue.ledger()[0].acked_by == {"train"}
        put_all(queue, "p0")
        lease = queue.lease("reference", groups=2, deadline_s=0)
        given = ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])
        queue.ack(lease, {"reference_logprobs": given})
        assert [entry.state for entry in queue.ledger()] == ["done", "settled"]
        queue.drop("p1", reason="lost", reissue=True)
        assert queue.ledger()[1].acked_by == frozenset()
