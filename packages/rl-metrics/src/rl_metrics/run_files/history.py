"""metrics.jsonl as columns for curves, checks and comparisons; fast enough for runs of a million steps.

A live run extends a `GrowingHistory` instead of reading its file again.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.record_fields import converts_arguments
from rl_metrics.run_files.json_lines import number_or_nan, parse_line
from rl_metrics.trackers.jsonl import LATE, read_step_lines

FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]

_Part = tuple[IntColumn, IntColumn, FloatColumn]
"""Lines with one metric in one layout, their rows in the history, and their values."""

BLOCK_VALUES = 1 << 16
"""Number of values collected as Python numbers before they are packed into an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Metrics of a run so far.

    Attributes:
        steps: [S] int64, increasing numbers of finished optimizer steps.
        times: [S] float64, time of writing in seconds since the epoch; NaN if unknown.
        values: [S] float64 by metric, in order of first appearance; NaN if a step lacks the metric or its value was not
            finite.
    """

    steps: IntColumn
    times: FloatColumn
    values: Mapping[str, FloatColumn]

    def get(self, name: str) -> FloatColumn | None:
        """Return the [S] float64 column of a metric, or None if no step has it."""
        return self.values.get(name)

    def finite(self, name: str) -> FloatColumn:
        """Return the finite values of a metric; empty if no step has one."""
        column = self.get(name)
        return np.zeros(0) if column is None else column[np.isfinite(column)]


@converts_arguments
def read_history(path: Path) -> History:
    """Read the metrics of a run, which may still be writing, with the resume rule of `read_metrics`.

    Columns are stored sparsely until they are requested.

    Args:
        path: A file of JsonlTracker.

    Raises:
        OSError: The file cannot be read.
    """
    lines = _Lines()
    for step, row in read_step_lines(path, decode=_decode):
        lines.add(step, row)
    return lines.history()


class _Columns(Mapping[str, FloatColumn]):
    """Columns by name, each kept as the rows that have it and their values."""

    def __init__(self, num_rows: int, parts: Mapping[str, tuple[IntColumn, FloatColumn]]) -> None:
        self._num_rows = num_rows
        self._parts = parts

    def __getitem__(self, name: str) -> FloatColumn:
        rows, values = self._parts[name]
        if len(rows) == self._num_rows:  # every row once, in order
            return values
        column = np.full(self._num_rows, np.nan)
        column[rows] = values
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts


@dataclass(slots=True)
class _Layout:
    """Lines that have the same metrics in the same order."""

    names: tuple[str, ...]
    rows: "array[int]" = field(default_factory=lambda: array("q"))
    waiting: list[Any] = field(default_factory=list)
    blocks: list[FloatColumn] = field(default_factory=list)

    def add(self, row: int, values: Mapping[str, Any]) -> None:
        self.rows.append(row)
        self.waiting.extend(values.values())
        if len(self.waiting) >= BLOCK_VALUES:
            self._pack()

    def take(self) -> FloatColumn:
        """Return and release the [lines, names] values."""
        self._pack()
        matrix = np.concatenate(self.blocks).reshape(len(self.rows), len(self.names))
        self.blocks = []
        return matrix

    def _pack(self) -> None:
        try:
            block = np.array(self.waiting, dtype=np.float64)  # None becomes NaN
        except OverflowError:
            block = np.array([number_or_nan(value) for value in self.waiting], dtype=np.float64)
        block[~np.isfinite(block)] = np.nan
        self.blocks.append(block)
        self.waiting = []


class _Lines:
    """All lines of a file in order, including replaced ones."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._times = array("d")
        self._late = array("q")
        self._layouts: dict[tuple[str, ...], _Layout] = {}

    def add(self, step: int, row: dict[str, Any]) -> None:
        is_late = row.pop(LATE, False) is True
        written = row.pop("time", None)
        index = len(self._steps)
        self._steps.append(step)
        self._times.append(number_or_nan(written))
        if is_late:
            self._late.append(index)
        names = tuple(row)
        layout = self._layouts.get(names)
        if layout is None:
            layout = self._layouts[names] = _Layout(names)
        layout.add(index, row)

    def history(self) -> History:
        steps, late = np.array(self._steps, dtype=np.int64), np.array(self._late, dtype=np.int64)
        standing = _standing(steps, late)
        place = _places(steps, late, standing)
        times = np.array(self._times, dtype=np.float64)[standing]
        return History(steps=steps[standing], times=times, values=self._columns(place, len(standing)))

    def _columns(self, place: IntColumn, num_rows: int) -> _Columns:
        parts: dict[str, list[_Part]] = {}
        for names in list(self._layouts):
            layout = self._layouts.pop(names)  # frees its memory before the next is unpacked
            lines = np.array(layout.rows, dtype=np.int64)
            kept = np.flatnonzero(place[lines] >= 0)
            if not len(kept) or not names:
                continue
            lines, rows, matrix = lines[kept], place[lines[kept]], layout.take()
            for number, name in enumerate(names):
                parts.setdefault(name, []).append((lines, rows, matrix[kept, number]))
        return _Columns(num_rows, {name: _merged(of_name) for name, of_name in parts.items()})


def _standing(steps: IntColumn, late: IntColumn) -> IntColumn:
    """Return lines that no later line replaces: their step is below all that follow, ignoring late lines."""
    own = np.setdiff1d(np.arange(len(steps)), late, assume_unique=True)
    if not len(own):
        return own
    lowest = np.minimum.accumulate(steps[own][::-1])[::-1]
    is_standing = np.append(steps[own][:-1] < lowest[1:], True)
    standing: IntColumn = own[is_standing]
    return standing


def _places(steps: IntColumn, late: IntColumn, standing: IntColumn) -> IntColumn:
    """Return the [lines] row of the history that each line belongs to, or -1."""
    place = np.full(len(steps), -1, dtype=np.int64)
    place[standing] = np.arange(len(standing))
    if len(late) and len(standing):
        row = np.minimum(np.searchsorted(steps[standing], steps[late]), len(standing) - 1)
        belongs = (steps[standing][row] == steps[late]) & (standing[row] < late)
        place[late[belongs]] = row[belongs]
    return place


def _merged(parts: list[_Part]) -> tuple[IntColumn, FloatColumn]:
    """Return increasing rows and values of one metric; the last line of a row wins."""
    if len(parts) == 1 and np.all(parts[0][1][1:] > parts[0][1][:-1]):
        return parts[0][1:]
    lines, rows, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((lines, rows))
    rows, values = rows[order], values[order]
    is_last = np.append(rows[1:] != rows[:-1], True)
    return rows[is_last], values[is_last]


_NUMBERS = msgspec.json.Decoder(dict[str, int | float | bool | None])


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        return _NUMBERS.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        row = parse_line(line)
        return row and {name: value if isinstance(value, (int, float)) else None for name, value in row.items()}


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
