"""Several trackers as one; none of them can stop a run."""

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
    """Passes everything to trackers; one that raises is warned of once, closed and left out from then on.

    One that is kept is tried again at every call: a disk that was full for a while costs its steps, not all the rest.
    """

    def __init__(self, trackers: Mapping[str, Tracker], *, kept: Collection[str] = ()) -> None:
        """Hold the trackers.

        Args:
            trackers: By name, as it appears in the warning.
            kept: Names of those that are tried again after they raised.
        """
        self._trackers = dict(trackers)
        self._kept = frozenset(kept)
        self._failing: set[str] = set()

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the trackers that still get what comes."""
        return tuple(self._trackers)

    def add(self, name: str, tracker: Tracker) -> None:
        """Pass what comes from now on to one more tracker; the first to be closed."""
        self._trackers[name] = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of one step to every tracker that still works."""
        named = _encodable(metrics)
        self._pass(lambda tracker: tracker.log(step, named))

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass metrics that come after those of later steps to every tracker that still works."""
        named = _encodable(metrics)
        self._pass(lambda tracker: tracker.log_late(step, named))

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Pass a table of samples to every tracker that still works."""
        self._pass(lambda tracker: tracker.log_generations(step, encodable(name), samples))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Pass distributions, where there are some, to every tracker that still works."""
        if histograms:
            named = _encodable(histograms)
            self._pass(lambda tracker: tracker.log_histograms(step, named))

    def close(self) -> None:
        """Close all trackers. Can be called twice."""
        while self._trackers:
            name, tracker = self._trackers.popitem()
            self._survives(name, tracker.close)

    def _pass(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            works = self._survives(name, partial(call, tracker), is_silent=name in self._failing)
            if name in self._kept:
                self._note(name, works=works)
            elif not works:
                del self._trackers[name]
                self._survives(name, tracker.close, is_silent=True)

    def _note(self, name: str, *, works: bool) -> None:
        if not works:
            self._failing.add(name)
        elif name in self._failing:
            self._failing.discard(name)
            log.warning("tracker_works_again", tracker=name)

    def _survives(self, name: str, call: Callable[[], None], *, is_silent: bool = False) -> bool:
        try:
            call()
        except Exception as error:
            if not is_silent:
                log.warning("tracker_failed", tracker=name, error=f"{type(error).__name__}: {error}")
            return False
        return True


def _encodable(values: Mapping[str, Value]) -> dict[str, Value]:
    """Values by names that every tracker takes: a name may have that of a data source in it."""
    return {encodable(name): value for name, value in values.items()}
