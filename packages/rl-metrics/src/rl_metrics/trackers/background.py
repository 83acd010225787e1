"""Tracker wrapper that runs a slow tracker on its own thread, so that the run never waits for it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

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

    Attributes:
        num_dropped: Number of calls dropped so far.
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
        self._lock = threading.RLock()  # a warning may log to this tracker again
        self._calls: SimpleQueue[tuple[str, Callable[[], None]] | None] = SimpleQueue()
        self._running = "nothing"
        self.num_dropped = 0
        self._error: Exception | None = None
        self._has_failed = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of one step; never blocks.

        Raises:
            Exception: An earlier error of the tracker.
            NotReadyError: After that error, or after `close`.
        """
        self._put(f"log of step {step}", partial(self._tracker.log, step, dict(metrics)))

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue metrics that arrive after those of later steps, as `log` does."""
        self._put(f"late metrics of step {step}", partial(self._tracker.log_late, step, dict(metrics)))

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Queue a table; never blocks.

        Raises:
            Exception: An earlier error of the tracker.
            NotReadyError: After that error, or after `close`.
        """
        self._put(f"{name} of step {step}", partial(self._tracker.log_generations, step, name, tuple(samples)))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Queue the distributions of one step, as `log` does."""
        self._put(f"histograms of step {step}", partial(self._tracker.log_histograms, step, dict(histograms)))

    def close(self) -> None:
        """Process queued calls and close the tracker, within the deadline. Idempotent.

        Raises:
            Exception: An error of the tracker that no call has raised yet.
        """
        with self._lock:
            is_first, self._is_closing = not self._is_closing, True
        if not is_first:
            return
        self._calls.put(None)
        self._thread.join(self._close_deadline_s)
        if self._thread.is_alive():
            log.warning(
                "tracker_close_timed_out",
                tracker=self._name,
                deadline_s=self._close_deadline_s,
                running=self._running,
                num_pending=max(self._calls.qsize() - 1, 0),  # without the end
            )
        if self.num_dropped:
            log.warning("tracker_dropped", tracker=self._name, num_dropped=self.num_dropped)
        self._raise_error()

    def _put(self, description: str, call: Callable[[], None]) -> None:
        with self._lock:
            self._raise_error()
            if self._is_closing or self._has_failed:
                state = "failed" if self._has_failed else "is closed"
                raise NotReadyError(f"tracker {self._name} {state}; create a new BackgroundTracker.")
            if self._calls.qsize() < self._capacity:
                self._calls.put((description, call))
                return
            self.num_dropped += 1
            if self.num_dropped == 1:
                log.warning("tracker_behind", tracker=self._name, capacity=self._capacity, dropped=description)

    def _raise_error(self) -> None:
        """Raise an error of the tracker, once."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        try:
            while (entry := self._calls.get()) is not None:
                self._running, call = entry
                call()
                self._running = "nothing"
        except Exception as error:
            with self._lock:
                self._error, self._has_failed = error, True
        self._running = "close"
        try:
            self._tracker.close()
        except Exception as error:
            with self._lock:
                self._error = self._error or error
