"""A live history of a run's metrics, without rereading its file."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping

import numpy as np

from rl_metrics.run_files.history import History


class GrowingHistory:
    """Selected metrics of each step; a repeated step replaces itself and all later steps."""

    def __init__(self, keeps: Callable[[str], bool], *, before: History | None = None) -> None:
        """Start with the existing metrics of a run.

        Args:
            keeps: Returns True for the names of metrics to keep.
            before: Metrics so far; None for a new run.
        """
        self._keeps = keeps
        self._is_kept: dict[str, bool] = {}
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        if before is not None:
            self._steps.extend(before.steps.tolist())
            self._columns = {
                name: array("d", before.values[name].tolist()) for name in before.values if self._keep(name)
            }

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        size = bisect_left(self._steps, step)
        del self._steps[size:]
        self._steps.append(step)
        for column in self._columns.values():
            del column[size:]
            column.append(np.nan)
        self._put(size, metrics)

    def add_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add more metrics to an earlier step; does nothing if there is no such step."""
        place = bisect_left(self._steps, step)
        if place < len(self._steps) and self._steps[place] == step:
            self._put(place, metrics)

    def history(self) -> History:
        """Return a copy of the history."""
        return History(
            steps=np.array(self._steps, dtype=np.int64),
            times=np.full(len(self._steps), np.nan),
            values={name: np.array(column, dtype=np.float64) for name, column in self._columns.items()},
        )

    def _put(self, place: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if self._keep(name):
                if name not in self._columns:
                    self._columns[name] = array("d", [np.nan]) * len(self._steps)
                self._columns[name][place] = value

    def _keep(self, name: str) -> bool:
        if name not in self._is_kept:
            self._is_kept[name] = self._keeps(name)
        return self._is_kept[name]
