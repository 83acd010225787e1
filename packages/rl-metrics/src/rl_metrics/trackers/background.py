"""Tracker wrapper that runs a slow tracker on its own thread, so that the run never waits for it."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import structlog

from rl_core.errors import NotReadyError, SettingsError
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.protocol import Tracker

log = structlog.get_logger(__name__)


class BackgroundTracker:
    """Passes calls to a tracker on a thread, in order; calls are dropped if the queue is full.

    Dropped calls are counted and cause a warning. The next call raises an error of the tracker, so that a `Fanout`
    removes it. Thread-safe.
    """

    def __init__(self, tracker: Tracker, *, name: str, capacity: int = 256, close_deadline_s: float = 30.0) -> None:
        """Start the thread.

        Args:
            tracker: The slow tracker; only the thread may use it from now on.
            name: Name in warnings.
            capacity: Maximum number of queued calls, at least 1.
            close_deadline_s: Maximum duration of `close`, in seconds.

        Raises:
            SettingsError: The capacity is less than 1, or the deadline negative.
        """
        if capacity < 1 or not close_deadline_s >= 0:
            raise SettingsError(
                f"capacity must be at least 1 and close_deadline_s at least 0; found {capacity} and {close_deadline_s}."
            )
        self._tracker = tracker
        self._name = name
        self._capacity = capacity
        self._close_deadline_s = close_deadline_s
        self._changed = threading.Condition()
        self._calls: deque[tuple[str, Callable[[], None]]] = deque()
        self._running = "nothing"
        self._num_dropped = 0
        self._error: Exception | None = None
        self._has_failed = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Number of calls dropped so far."""
        with self._changed:
            return self._num_dropped

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of one step; never blocks.

        Raises:
            Exception: An earlier error of the tracker.
            NotReadyError: After that error, or after `close`.
        """
        values = dict(metrics)
        self._put(f"log of step {step}", lambda: self._tracker.log(step, values))

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue metrics that arrive after those of later steps, as `log` does."""
        values = dict(metrics)
        self._put(f"late metrics of step {step}", lambda: self._tracker.log_late(step, values))

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Queue a table; never blocks.

        Raises:
            Exception: An earlier error of the tracker.
            NotReadyError: After that error, or after `close`.
        """
        rows = tuple(samples)
        self._put(f"{name} of step {step}", lambda: self._tracker.log_generations(step, name, rows))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Queue the distributions of one step, as `log` does."""
        kept = dict(histograms)
        self._put(f"histograms of step {step}", lambda: self._tracker.log_histograms(step, kept))

    def close(self) -> None:
        """Process queued calls and close the tracker, within the deadline. Idempotent.

        Raises:
            Exception: An error of the tracker that no call has raised yet.
        """
        with self._changed:
            is_first, self._is_closing = not self._is_closing, True
            self._changed.notify_all()
        if not is_first:
            return
        self._thread.join(self._close_deadline_s)
        with self._changed:
            running, num_pending, num_dropped = self._running, len(self._calls), self._num_dropped
            error, self._error = self._error, None
        if self._thread.is_alive():
            log.warning(
                "tracker_close_timed_out",
                tracker=self._name,
                deadline_s=self._close_deadline_s,
                running=running,
                num_pending=num_pending,
            )
        if num_dropped:
            log.warning("tracker_dropped", tracker=self._name, num_dropped=num_dropped)
        if error is not None:
            raise error

    def _put(self, what: str, call: Callable[[], None]) -> None:
        with self._changed:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_closing or self._has_failed:
                state = "failed" if self._has_failed else "is closed"
                raise NotReadyError(f"tracker {self._name} {state}; create a new BackgroundTracker.")
            is_full = len(self._calls) >= self._capacity
            if not is_full:
                self._calls.append((what, call))
                self._changed.notify_all()
            else:
                self._num_dropped += 1
            is_first_drop = is_full and self._num_dropped == 1
        if is_first_drop:  # logged without the lock, because the log may call this again
            log.warning("tracker_behind", tracker=self._name, capacity=self._capacity, dropped=what)

    def _work(self) -> None:
        try:
            while (call := self._next()) is not None:
                call()
        except Exception as error:
            with self._changed:
                self._error, self._has_failed = error, True
                self._calls.clear()
        self._close_tracker()

    def _next(self) -> Callable[[], None] | None:
        """Return the next call, or None after the last one."""
        with self._changed:
            self._running = "nothing"
            self._changed.wait_for(lambda: bool(self._calls) or self._is_closing)
            if not self._calls:
                return None
            self._running, call = self._calls.popleft()
            return call

    def _close_tracker(self) -> None:
        with self._changed:
            self._running = "close"
        try:
            self._tracker.close()
        except Exception as error:
            with self._changed:
                self._error = self._error or error
