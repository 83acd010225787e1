"""The protocol of trackers; several trackers as one, and a slow one on its own thread."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Literal, Protocol, TypeVar

import structlog

from rl_core.data import encodable
from rl_core.errors import NotReadyError
from rl_core.record_fields import NonNegativeFloat, PositiveInt, converts_arguments
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample

log = structlog.get_logger(__name__)

Value = TypeVar("Value")

Ending = Literal["finished", "stopped", "failed"]
"""How a run ended, for trackers that show it."""


class Tracker(Protocol):
    """Receives the metrics of a run, step by step, and samples of the policy's responses.

    A tracker that derives from it ignores late metrics, samples and histograms unless it has its own methods for them.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive all metrics of one step, including its validation.

        Args:
            step: Number of finished optimizer steps; 0 is before the first.
            metrics: Values by name.
        """

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - ignores it
        """Receive metrics of a step after those of later steps, such as from a validation concurrent with training."""
        return

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:  # noqa: ARG002 - ignores it
        """Receive a table of samples, once per validation.

        Args:
            step: Number of optimizer steps of the validated weights.
            name: Name of the table, such as "val/generations".
            samples: Samples in the order of display.
        """
        return

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:  # noqa: ARG002 - ignores it
        """Receive the distributions of one step.

        Args:
            step: Number of finished optimizer steps.
            histograms: Histograms by name; the caller must not change them afterwards.
        """
        return

    def close(self) -> None:
        """Write pending data and release resources. Idempotent."""


class Fanout:
    """Passes calls to several trackers; one that raises causes a warning, is closed and removed.

    A kept tracker is tried again at every call, so that a temporarily full disk loses only the steps of that time.
    """

    def __init__(self, trackers: Mapping[str, Tracker], *, kept: Collection[str] = ()) -> None:
        """Store the trackers.

        Args:
            trackers: Trackers by name, which warnings show.
            kept: Names of trackers to try again after an error.
        """
        self._trackers = dict(trackers)
        self._kept = frozenset(kept)
        self._failing: set[str] = set()

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the trackers that still receive calls."""
        return tuple(self._trackers)

    def add(self, name: str, tracker: Tracker) -> None:
        """Add a tracker for later calls; it is closed first."""
        self._trackers[name] = tracker
        self._failing.discard(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of one step to all active trackers."""
        named = _encodable(metrics)
        self._pass(lambda tracker: tracker.log(step, named))

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass metrics that arrive after those of later steps to all active trackers."""
        named = _encodable(metrics)
        self._pass(lambda tracker: tracker.log_late(step, named))

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Pass a table of samples to all active trackers."""
        self._pass(lambda tracker: tracker.log_generations(step, encodable(name), samples))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Pass distributions, if any, to all active trackers."""
        if histograms:
            named = _encodable(histograms)
            self._pass(lambda tracker: tracker.log_histograms(step, named))

    def close(self) -> None:
        """Close all trackers. Idempotent."""
        self._failing.clear()  # a failure to close is reported, also of a tracker that failed before
        while self._trackers:
            name, tracker = self._trackers.popitem()
            self._try(name, tracker.close)

    def _pass(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in tuple(self._trackers.items()):
            was_failing = name in self._failing
            if self._try(name, partial(call, tracker)):
                if was_failing:
                    self._failing.discard(name)
                    log.warning("tracker_works_again", tracker=name)
            elif name not in self._kept:
                del self._trackers[name]
                self._try(name, tracker.close)

    def _try(self, name: str, call: Callable[[], None]) -> bool:
        """Return whether a call works; the first error of a tracker is logged."""
        try:
            call()
        except Exception as error:
            if name not in self._failing:
                log.warning("tracker_failed", tracker=name, error=f"{type(error).__name__}: {error}")
            self._failing.add(name)
            return False
        return True


def _encodable(values: Mapping[str, Value]) -> dict[str, Value]:
    """Replace characters of names that trackers cannot encode; a name may contain that of a data source."""
    return {encodable(name): value for name, value in values.items()}


class BackgroundTracker:
    """Passes calls to a tracker on a thread, in order; calls are dropped if the queue is full.

    Dropped calls are counted and cause a warning. The next call raises an error of the tracker, so that a `Fanout`
    removes it. Thread-safe.

    Attributes:
        num_dropped: Number of calls dropped so far.
    """

    @converts_arguments
    def __init__(
        self, tracker: Tracker, *, name: str, capacity: PositiveInt = 256, close_deadline_s: NonNegativeFloat = 30.0
    ) -> None:
        """Start the thread.

        Args:
            tracker: The slow tracker; only the thread may use it from now on.
            name: Name in warnings.
            capacity: Maximum number of queued calls, at least 1.
            close_deadline_s: Maximum duration of `close`, in seconds.

        Raises:
            SettingsError: The capacity is less than 1, or the deadline negative.
        """
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
