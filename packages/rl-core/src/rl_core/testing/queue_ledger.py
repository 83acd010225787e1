# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of what a transfer queue says about itself."""

from rl_core.errors import DataError
from rl_core.queue.interface import LedgerEntry
from rl_core.testing.queue_checks import QueueChecks, put_all, refuses
from rl_core.testing.rows import make_prompts, make_trajectory


class LedgerChecks(QueueChecks):
    """Each prompt's way, and the numbers."""

    def test_the_ledger_follows_each_prompt(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(4), num_sessions=2)
        queue.put("p0", 1, [make_trajectory("p0", 1)])
        for uid in ("p1", "p2"):
            queue.fail(uid, 0, reason="engine aborted")
            queue.put(uid, 1, [make_trajectory(uid, 1)])
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        queue.drop("p3", reason="too easy")
        failed = {0: "engine aborted"}
        expected = [
            ("p0", "issued", 1, {}, set(), None),
            ("p1", "done", 2, failed, {"train"}, None),
            ("p2", "settled", 2, failed, set(), None),
            ("p3", "dropped", 0, {}, set(), "too easy"),
        ]
        assert [_fields(entry) for entry in queue.ledger()] == expected

    def test_finished_prompts_are_forgotten_on_request(self) -> None:
        queue = self.filled(num_prompts=3)
        queue.ack(queue.lease("train", groups=1, deadline_s=0))
        queue.drop("p1", reason="too easy")
        assert queue.forget_finished() == 2
        assert queue.forget_finished() == 0
        assert [entry.prompt_uid for entry in queue.ledger()] == ["p2"]
        with refuses(DataError, "'p0'", "forgotten"):
            put_all(queue, "p0")

    def test_the_stats_count_what_is_held(self) -> None:
        queue = self.queue()
        queue.issue(make_prompts(3), num_sessions=2)
        put_all(queue, "p0", num_sessions=2)
        queue.put("p1", 0, [make_trajectory("p1", 0, output) for output in range(3)])
        queue.drop("p2", reason="too easy")
        self.advance(queue, 5)
        queue.lease("train", groups=1, deadline_s=0)
        self.advance(queue, 2)
        stats = queue.stats()
        found = {name: value for name, value in stats.items() if value and not name.startswith("size_bytes")}
        assert found == {
            "groups/dropped": 1.0,
            "groups/issued": 1.0,
            "groups/settled": 1.0,
            "rows": 5.0,
            "rows/issued": 3.0,
            "rows/settled": 2.0,
            "rows/leased": 2.0,
            "leases": 1.0,
            "oldest_lease_s": 2.0,
            "oldest_issued_s": 7.0,
            "drops/too easy": 1.0,
        }
        for name, num_rows in [("size_bytes", 5), ("size_bytes/issued", 3), ("size_bytes/leased", 2)]:
            assert num_rows * 5 * (4 + 1 + 4 + 4) <= stats[name] < num_rows * 5 * 2 * (4 + 1 + 4 + 4)

    def test_an_empty_queue_holds_nothing(self) -> None:
        queue = self.filled(num_prompts=2)
        queue.ack(queue.lease("train", groups=2, deadline_s=0))
        queue.forget_finished()
        self.advance(queue, 3)
        assert {name: value for name, value in queue.stats().items() if value} == {"acks/train": 2.0}
        assert queue.ledger() == []


def _fields(entry: LedgerEntry) -> tuple[object, ...]:
    return (
        entry.prompt_uid,
        entry.state,
        entry.sessions_settled,
        dict(entry.sessions_failed),
        set(entry.acked_by),
        entry.reason,
    )
