import resource

import structlog

from rl_metrics.reductions.histogram import Histogram
from rl_metrics.trackers.jsonl import JsonlTracker, read_metrics
from rl_metrics.trackers.tracker import Fanout


class ListTracker:
    def __init__(self, *, fails_at=None, close_fails=False):
        self.rows = []
        self.num_closed = 0
        self.fails_at = fails_at
        self.close_fails = close_fails

    def log(self, step, metrics):
        if step == self.fails_at:
            raise OSError("disk full")
        self.rows.append((step, dict(metrics)))

    def log_late(self, step, metrics):
        if step == self.fails_at:
            raise OSError("disk full")
        self.rows.append((step, "late", dict(metrics)))

    def log_generations(self, step, name, samples):
        if step == self.fails_at:
            raise OSError("disk full")
        self.rows.append((step, name, list(samples)))

    def log_histograms(self, step, histograms):
        if step == self.fails_at:
            raise OSError("disk full")
        self.rows.append((step, dict(histograms)))

    def close(self):
        self.num_closed += 1
        if self.close_fails:
            raise OSError("still full")


def test_all_get_everything():
    first, second = ListTracker(), ListTracker()
    fanout = Fanout({"first": first, "second": second})
    fanout.log(1, {"a": 1.0})
    fanout.close()
    fanout.close()
    assert first.rows == second.rows == [(1, {"a": 1.0})]
    assert (first.num_closed, second.num_closed) == (1, 1)


def test_one_that_raises_is_warned_of_once_and_left_out():
    good, bad = ListTracker(), ListTracker(fails_at=2, close_fails=True)
    fanout = Fanout({"bad": bad, "good": good})
    with structlog.testing.capture_logs() as logs:
        for step in (1, 2, 3):
            fanout.log(step, {})
        fanout.close()
    assert [step for step, _ in bad.rows] == [1]
    assert [step for step, _ in good.rows] == [1, 2, 3]
    assert bad.num_closed == 1
    assert logs == [
        {"event": "tracker_failed", "log_level": "warning", "tracker": "bad", "error": "OSError: disk full"}
    ]


def test_one_that_is_kept_is_tried_again():
    kept = ListTracker(fails_at=2)
    fanout = Fanout({"record": kept}, kept=["record"])
    with structlog.testing.capture_logs() as logs:
        for step in (1, 2, 2, 3, 4, 2):
            fanout.log(step, {})
    assert [step for step, _ in kept.rows] == [1, 3, 4]
    assert fanout.active == ("record",)
    assert [entry["event"] for entry in logs] == ["tracker_failed", "tracker_works_again", "tracker_failed"]
    fanout.close()
    assert kept.num_closed == 1


def test_a_disk_that_was_full_for_a_while_costs_its_steps_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    fanout = Fanout({"jsonl": JsonlTracker(path)}, kept=["jsonl"])
    fanout.log(1, {"loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with structlog.testing.capture_logs() as logs:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, before[1]))
        try:
            fanout.log(2, {"loss": 2.0})
            fanout.log(3, {"loss": 3.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        fanout.log(4, {"loss": 4.0})
    fanout.close()
    assert [row.step for row in read_metrics(path)] == [1, 4]
    assert [entry["event"] for entry in logs[:2]] == ["tracker_failed", "tracker_works_again"]


def test_generations_go_to_all_that_still_work():
    good, bad = ListTracker(), ListTracker(fails_at=2)
    fanout = Fanout({"bad": bad, "good": good})
    with structlog.testing.capture_logs() as logs:
        for step in (1, 2, 3):
            fanout.log_generations(step, "val/generations", ["sample"])
    assert bad.rows == [(1, "val/generations", ["sample"])]
    assert good.rows == [(step, "val/generations", ["sample"]) for step in (1, 2, 3)]
    assert fanout.active == ("good",)
    assert bad.num_closed == 1
    assert [entry["event"] for entry in logs] == ["tracker_failed"]


def test_late_metrics_go_to_all_that_still_work():
    good, bad = ListTracker(), ListTracker(fails_at=2)
    fanout = Fanout({"bad": bad, "good": good})
    with structlog.testing.capture_logs() as logs:
        for step in (1, 2, 3):
            fanout.log_late(step, {"a": 1.0})
    assert bad.rows == [(1, "late", {"a": 1.0})]
    assert good.rows == [(step, "late", {"a": 1.0}) for step in (1, 2, 3)]
    assert fanout.active == ("good",)
    assert bad.num_closed == 1
    assert [entry["event"] for entry in logs] == ["tracker_failed"]


def test_histograms_go_to_all_that_still_work():
    good, bad = ListTracker(), ListTracker(fails_at=2)
    fanout = Fanout({"bad": bad, "good": good})
    histograms = {"distribution/reward": Histogram()}
    with structlog.testing.capture_logs() as logs:
        for step in (1, 2, 3):
            fanout.log_histograms(step, histograms)
    assert bad.rows == [(1, histograms)]
    assert good.rows == [(step, histograms) for step in (1, 2, 3)]
    assert [entry["event"] for entry in logs] == ["tracker_failed"]


def test_the_active_ones_are_named():
    fanout = Fanout({"bad": ListTracker(fails_at=1), "good": ListTracker()})
    assert fanout.active == ("bad", "good")
    fanout.log(1, {})
    assert fanout.active == ("good",)


def test_a_close_that_raises_does_not_keep_others_open():
    bad, good = ListTracker(close_fails=True), ListTracker()
    with structlog.testing.capture_logs() as logs:
        Fanout({"good": good, "bad": bad}).close()
    assert good.num_closed == 1
    assert [entry["error"] for entry in logs] == ["OSError: still full"]


def test_a_tracker_that_is_added_gets_what_comes_then_and_is_closed_first():
    closed = []
    first, second = ListTracker(), ListTracker()
    first.close, second.close = lambda: closed.append("first"), lambda: closed.append("second")
    fanout = Fanout({"first": first})
    fanout.log(1, {})
    fanout.add("second", second)
    fanout.log(2, {})
    fanout.close()
    assert [step for step, _ in second.rows] == [2]
    assert closed == ["second", "first"]
