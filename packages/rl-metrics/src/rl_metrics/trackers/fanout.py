"""Several trackers as one, which cannot stop a run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import structlog

from rl_core.data import encodable
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.protocol import Tracker

Value = TypeVar("Value")

log = structlog.get_logger(__name__)


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
