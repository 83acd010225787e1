import threading

import pytest
import structlog

from rl_core.errors import NotReadyError, SettingsError
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.trackers.tracker import BackgroundTracker, Fanout

DEADLINE_S = 60.0


class GatedTracker:
    """A tracker whose calls block until the test opens the gate."""

    def __init__(self, *, is_open=False, fails_at=None, close_fails=False):
        self.gate = threading.Event()
        self.is_busy = threading.Event()
        self.is_closed = threading.Event()
        self.calls = []
        self.fails_at = fails_at
        self.close_fails = close_fails
        if is_open:
            self.gate.set()

    def log(self, step, metrics):
        self._take(step, metrics)

    def log_late(self, step, metrics):
        self._take(step, ("late", metrics))

    def log_generations(self, step, name, samples):
        self._take(step, (name, samples))

    def log_histograms(self, step, histograms):
        self._take(step, ("histograms", histograms))

    def close(self):
        self.is_closed.set()
        if self.close_fails:
            raise OSError("cannot close")

    def _take(self, step, what):
        self.is_busy.set()
        assert self.gate.wait(DEADLINE_S)
        if step == self.fails_at:
            raise OSError("server gone")
        self.calls.append((step, what, threading.current_thread().name))


@pytest.fixture
def gated():
    tracker = GatedTracker()
    yield tracker
    tracker.gate.set()  # lets the tracker's thread end


def test_calls_arrive_in_order_on_another_thread():
    inner = GatedTracker(is_open=True)
    tracker = BackgroundTracker(inner, name="slow")
    for step in range(20):
        tracker.log(step, {"a": float(step)})
    tracker.log_late(7, {"a": 0.5})
    tracker.log_generations(20, "val/generations", ["sample"])
    tracker.close()
    tracker.close()
    assert [call[:2] for call in inner.calls] == [
        *((step, {"a": float(step)}) for step in range(20)),
        (7, ("late", {"a": 0.5})),
        (20, ("val/generations", ("sample",))),
    ]
    assert {call[2] for call in inner.calls} == {"tracker-slow"}
    assert inner.is_closed.is_set()


def test_what_the_caller_changes_later_does_not_arrive(gated):
    tracker = BackgroundTracker(gated, name="slow")
    metrics, samples = {"a": 1.0}, ["one"]
    tracker.log(1, metrics)
    tracker.log_late(1, metrics)
    tracker.log_generations(1, "val", samples)
    metrics["a"] = 2.0
    samples.append("two")
    gated.gate.set()
    tracker.close()
    assert [call[1] for call in gated.calls] == [{"a": 1.0}, ("late", {"a": 1.0}), ("val", ("one",))]


def test_what_does_not_fit_is_dropped_counted_and_warned_of_once(gated):
    with structlog.testing.capture_logs() as logs:
        tracker = BackgroundTracker(gated, name="slow", capacity=2)
        tracker.log(0, {})
        assert gated.is_busy.wait(DEADLINE_S)  # the first call has left the queue
        for step in range(1, 6):
            tracker.log(step, {})
        assert tracker.num_dropped == 3
        gated.gate.set()
        tracker.close()
    assert [call[0] for call in gated.calls] == [0, 1, 2]
    assert logs == [
        {
            "event": "tracker_behind",
            "log_level": "warning",
            "tracker": "slow",
            "capacity": 2,
            "dropped": "log of step 3",
        },
        {"event": "tracker_dropped", "log_level": "warning", "tracker": "slow", "num_dropped": 3},
    ]


def test_a_tracker_that_hangs_does_not_keep_close(gated):
    with structlog.testing.capture_logs() as logs:
        tracker = BackgroundTracker(gated, name="slow", close_deadline_s=0.0)
        tracker.log(1, {})
        assert gated.is_busy.wait(DEADLINE_S)
        tracker.log_generations(2, "val", [])
        tracker.close()
        tracker.close()
    assert logs == [
        {
            "event": "tracker_close_timed_out",
            "log_level": "warning",
            "tracker": "slow",
            "deadline_s": 0.0,
            "running": "log of step 1",
            "num_pending": 1,
        }
    ]
    gated.gate.set()
    assert gated.is_closed.wait(DEADLINE_S)  # queued calls are still written
    assert [call[0] for call in gated.calls] == [1, 2]


def test_an_error_is_raised_by_the_next_call_once_and_then_nothing_is_taken():
    inner = GatedTracker(is_open=True, fails_at=1)
    tracker = BackgroundTracker(inner, name="slow")
    tracker.log(1, {})
    assert inner.is_closed.wait(DEADLINE_S)
    with pytest.raises(OSError, match="server gone"):
        tracker.log(2, {})
    with pytest.raises(NotReadyError, match="slow failed"):
        tracker.log_generations(2, "val", [])
    tracker.close()
    assert inner.calls == []


def test_an_error_that_no_call_has_raised_is_raised_by_close():
    for inner, message in (
        (GatedTracker(is_open=True, fails_at=1, close_fails=True), "server gone"),
        (GatedTracker(is_open=True, close_fails=True), "cannot close"),
    ):
        tracker = BackgroundTracker(inner, name="slow")
        tracker.log(1, {})
        with pytest.raises(OSError, match=message):
            tracker.close()
        tracker.close()


def test_an_error_of_late_metrics_is_raised_by_the_next_late_metrics_once():
    inner = GatedTracker(is_open=True, fails_at=1)
    tracker = BackgroundTracker(inner, name="slow")
    tracker.log_late(1, {})
    assert inner.is_closed.wait(DEADLINE_S)
    with pytest.raises(OSError, match="server gone"):
        tracker.log_late(2, {})
    with pytest.raises(NotReadyError, match="slow failed"):
        tracker.log_late(2, {})


def test_a_fanout_leaves_out_one_that_failed_behind_its_thread():
    inner, other = GatedTracker(is_open=True, fails_at=1), GatedTracker(is_open=True)
    fanout = Fanout({"slow": BackgroundTracker(inner, name="slow"), "other": other})
    with structlog.testing.capture_logs() as logs:
        fanout.log(1, {})
        assert inner.is_closed.wait(DEADLINE_S)
        for step in (2, 3):
            fanout.log(step, {})
        fanout.close()
    assert [call[0] for call in other.calls] == [1, 2, 3]
    assert [(entry["event"], entry["error"]) for entry in logs] == [("tracker_failed", "OSError: server gone")]


def test_many_threads_may_call():
    inner = GatedTracker(is_open=True)
    tracker = BackgroundTracker(inner, name="slow", capacity=1000)
    threads = [
        threading.Thread(target=lambda part=part: [tracker.log(step, {"part": part}) for step in range(50)])
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    tracker.close()
    for part in range(4):
        assert [step for step, metrics, _ in inner.calls if metrics["part"] == part] == list(range(50))


def test_after_close_it_says_so():
    tracker = BackgroundTracker(GatedTracker(is_open=True), name="slow")
    tracker.close()
    with pytest.raises(NotReadyError, match="slow is closed"):
        tracker.log(1, {})


@pytest.mark.parametrize("changed", [{"capacity": 0}, {"close_deadline_s": -1.0}, {"close_deadline_s": float("nan")}])
def test_impossible_settings_are_refused(changed):
    with pytest.raises(SettingsError, match="of BackgroundTracker must be"):
        BackgroundTracker(GatedTracker(is_open=True), name="slow", **changed)


def test_histograms_are_queued_as_they_were_given(gated):
    tracker = BackgroundTracker(gated, name="slow")
    given = {"distribution/reward": Histogram()}
    tracker.log_histograms(1, given)
    expected = dict(given)
    given.clear()
    gated.gate.set()
    tracker.close()
    assert gated.calls == [(1, ("histograms", expected), "tracker-slow")]
