# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of what goes into a transfer queue: prompts, sessions, rows."""

import numpy as np

from rl_core.errors import DataError, DeadlineError, NothingToLeaseError
from rl_core.testing.queue_checks import TRAIN_IN_ORDER, QueueChecks, put_all, refuses, uids_of
from rl_core.testing.rows import make_prompts, make_trajectory


class RowChecks(QueueChecks):
    """Prompts are issued, sessions are settled once, groups are delivered whole."""

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

    def test_half_a_group_is_not_delivered(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=3)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        with refuses(DeadlineError, "lacks sessions [0, 2]"):
            queue.lease("train", groups=1, deadline_s=0)
        queue.put("p0", 0, [make_trajectory("p0", 0)])
        queue.put("p0", 2, [make_trajectory("p0", 2)])
        assert len(queue.lease("train", groups=1, deadline_s=0).batch) == 3

    def test_a_session_may_give_several_rows_or_none(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=3)
        queue.put("p0", 2, [make_trajectory("p0", 2, output) for output in (1, 0)])
        queue.put("p0", 0, [])
        queue.put("p0", 1, [make_trajectory("p0", 1, num_response_tokens=7)])
        lease = queue.lease("train", groups=1, deadline_s=0)
        assert lease.batch.keys == (("p0", 1, 0), ("p0", 2, 0), ("p0", 2, 1))
        assert lease.batch.ragged("input_ids").lengths.tolist() == [9, 5, 5]

    def test_a_group_without_its_failed_sessions_is_delivered(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=2)
        queue.fail("p0", 0, reason="sandbox timed out")
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        assert queue.lease("train", groups=1, deadline_s=0).batch.keys == (("p0", 1, 0),)
        assert queue.ledger()[0].sessions_failed == {0: "sandbox timed out"}

    def test_a_prompt_whose_sessions_all_fail_is_dropped(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=2)
        queue.fail("p0", 0, reason="sandbox timed out")
        queue.fail("p0", 1, reason="engine aborted")
        entry = queue.ledger()[0]
        assert entry.state == "dropped"
        assert "sandbox timed out" in str(entry.reason)
        assert "engine aborted" in str(entry.reason)
        with refuses(NothingToLeaseError, "1 dropped"):
            queue.lease("train", groups=1, deadline_s=0)

    def test_a_prompt_without_any_row_is_dropped(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=1)
        queue.put("p0", 0, [])
        assert (queue.ledger()[0].state, queue.ledger()[0].reason) == (
            "dropped",
            "no rows: its sessions gave no trajectory",
        )

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

    def test_unknown_prompts_and_sessions_are_refused(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=2)
        with refuses(DataError, "'p9'", "never issued"):
            queue.put("p9", 0, [make_trajectory("p9", 0)])
        for session in (-1, 2):
            with refuses(DataError, "sessions 0 to 1", f"found session {session}"):
                queue.put("p0", session, [make_trajectory("p0", session)])

    def test_finished_prompts_take_nothing_more(self) -> None:
        queue = self.filled(num_prompts=2)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        queue.drop("p1", reason="too easy")
        with refuses(DataError, "'p0' is done"):
            queue.drop("p0", reason="late")
        with refuses(DataError, "'p1' is dropped", "too easy"):
            queue.put("p1", 0, [make_trajectory("p1", 0)])

    def test_rows_of_another_session_are_refused(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=2)
        for found in (make_trajectory("p1", 0), make_trajectory("p0", 1)):
            with refuses(DataError, "trajectory 0", f"{found.prompt_uid!r}"):
                queue.put("p0", 0, [found])
        with refuses(DataError, "output index twice"):
            queue.put("p0", 0, [make_trajectory("p0", 0, 1), make_trajectory("p0", 0, 1)])

    def test_values_that_are_not_finite_are_refused(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=1)
        for value in (np.nan, np.inf, -np.inf):
            logprobs = np.asarray([0, 0, -0.5, value, -0.5], dtype=np.float32)
            with refuses(DataError, "rollout_logprobs", "token 3"):
                queue.put("p0", 0, [make_trajectory("p0", 0, rollout_logprobs=logprobs)])
            with refuses(DataError, "reward", "finite"):
                queue.put("p0", 0, [make_trajectory("p0", 0, reward=float(value))])
        assert queue.ledger()[0].sessions_settled == 0

    def test_a_bad_row_makes_none_of_its_session_visible(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=1)
        bad = make_trajectory("p0", 0, 1, rollout_logprobs=np.full(5, np.nan, dtype=np.float32))
        with refuses(DataError, "output 1"):
            queue.put("p0", 0, [make_trajectory("p0", 0, 0), bad, make_trajectory("p0", 0, 2)])
        assert queue.stats()["rows"] == 0
        queue.put("p0", 0, [make_trajectory("p0", 0, 5)])
        assert queue.lease("train", groups=1, deadline_s=0).batch.keys == (("p0", 0, 5),)

    def test_a_prompt_is_issued_once_and_a_bad_issue_enters_none(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(1), num_sessions=1)
        with refuses(DataError, "'p0' was issued before"):
            queue.issue(list(reversed(make_prompts(2))), num_sessions=1)
        with refuses(DataError, "'p0' was issued before"):
            queue.issue(make_prompts(1) * 2, num_sessions=1)
        with refuses(DataError, "num_sessions", "found 0"):
            queue.issue(make_prompts(3)[2:], num_sessions=0)
        assert [entry.prompt_uid for entry in queue.ledger()] == ["p0"]

    def test_dropped_rows_are_never_delivered(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(2), num_sessions=1)
        queue.drop("p0", reason="too long")
        put_all(queue, "p1")
        assert uids_of(queue.lease("train", groups=2, deadline_s=0, allow_fewer=True)) == ["p1"]
        assert (queue.ledger()[0].state, queue.ledger()[0].reason) == ("dropped", "too long")
