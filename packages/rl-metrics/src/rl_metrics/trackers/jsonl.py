"""metrics.jsonl: one line a step, appended, never truncated."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_metrics.json_lines import JsonLinesWriter, read_json_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """The metrics of one step, as read back.

    Attributes:
        step: Optimizer steps done.
        time: Seconds since the epoch when it was written.
        metrics: Values by name; NaN where the value was not finite.
    """

    step: int
    time: float
    metrics: dict[str, float]


class JsonlTracker:
    """Writes `{"step": 1, "time": ..., "actor/entropy": ...}` lines; non-finite values are null."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; a resumed run goes on behind what is there.

        Args:
            path: Such as `run/metrics.jsonl`.
            clock: Seconds since the epoch.
        """
        self._writer = JsonLinesWriter(path)
        self._clock = clock

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        values = {name: float(value) for name, value in metrics.items()}
        self._writer.append({"step": step, "time": round(self._clock(), 3), **values})

    def close(self) -> None:
        """Close the file. Can be called twice."""
        self._writer.close()


def read_metrics(path: Path, *, with_replaced: bool = False) -> list[MetricRow]:
    """The metrics of a run, also one that is still writing.

    A run that was killed and resumed from an older checkpoint repeats steps: a line replaces the earlier lines of
    its own and later steps, so the result is the history of the run as it stands, with rising steps.

    Args:
        path: A file of JsonlTracker.
        with_replaced: True keeps the replaced lines, in the order of the file.
    """
    rows: list[MetricRow] = []
    for line in read_json_lines(path):
        row = _metric_row(line)
        if row is None:
            continue
        while not with_replaced and rows and rows[-1].step >= row.step:
            rows.pop()
        rows.append(row)
    return rows


def _metric_row(line: dict[str, Any]) -> MetricRow | None:
    step, written = line.pop("step", None), line.pop("time", None)
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    metrics = {name: _number(value) for name, value in line.items()}
    return MetricRow(step=step, time=_number(written), metrics=metrics)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
