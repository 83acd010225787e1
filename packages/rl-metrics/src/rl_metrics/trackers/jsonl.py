"""metrics.jsonl and histograms.jsonl with one line per step, generations.jsonl with one per sample; append-only."""

import bisect
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

import msgspec
import structlog

from rl_core.errors import DataError, NotReadyError
from rl_core.record_fields import converts_arguments
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import JsonLinesWriter, number_or_nan, parse_line, read_json_lines

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """The metrics of one step, as read back.

    Attributes:
        step: Optimizer steps done.
        time: Time of writing, in seconds since the epoch.
        metrics: Values by name; NaN for values that were not finite.
    """

    step: int
    time: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTable:
    """The samples of one validation, as read back.

    Attributes:
        step: Optimizer steps done.
        name: Name of the table.
        time: Time of writing, in seconds since the epoch.
        samples: Samples in order; fewer than logged if a kill truncated the table.
    """

    step: int
    name: str
    time: float
    samples: tuple[GenerationSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHistograms:
    """The distributions of one step, as read back.

    Attributes:
        step: Optimizer steps done.
        time: Time of writing, in seconds since the epoch.
        histograms: Histograms by name.
    """

    step: int
    time: float
    histograms: dict[str, Histogram]


LATE = "late"
"""Key that marks a line whose metrics arrived after those of later steps."""

RESERVED = frozenset({"step", "time", LATE})
"""Keys of a line that are not metrics; metrics with these names are dropped."""


class JsonlTracker:
    """Writes `{"step": 1, "time": ..., "actor/entropy": ...}` lines; non-finite values are null.

    Metrics named `step`, `time` or `late`, which are keys of the line, are dropped with a warning.

    Generations have their own file with complete texts, one line per sample: `{"step": 1, "name": ..., "index": 0,
    "prompt_uid": ...}`. So do distributions: `{"step": 1, "time": ..., "histograms": {"distribution/reward": {...}}}`.
    """

    @converts_arguments
    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; a resumed run appends to it.

        Args:
            path: Path of the file, such as `run/metrics.jsonl`. `generations.jsonl` and `histograms.jsonl` are created
                next to it when needed.
            clock: Returns seconds since the epoch.
        """
        self._writer = JsonLinesWriter(path)
        self._beside: dict[str, JsonLinesWriter] = {}
        self._clock = clock
        self._is_closed = False
        self._has_warned = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            DataError: The step is not an integer >= 0.
        """
        self._append(step, metrics)

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line that adds to the step's line and replaces none.

        Raises:
            DataError: The step is not an integer >= 0.
        """
        self._append(step, metrics, **{LATE: True})

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Append one line per sample.

        Raises:
            NotReadyError: After `close`.
            DataError: The step is not an integer >= 0.
        """
        step = _checked_step(step)
        file = self._file_beside("generations.jsonl")
        written = round(self._clock(), 3)
        for index, sample in enumerate(samples):
            place = {"step": step, "time": written, "name": name, "index": index}
            file.append({**place, **sample.to_json()})

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Append one line.

        Raises:
            NotReadyError: After `close`.
            DataError: The step is not an integer >= 0.
        """
        step = _checked_step(step)
        sketches = {name: histogram.to_json() for name, histogram in histograms.items()}
        row = {"step": step, "time": round(self._clock(), 3), "histograms": sketches}
        self._file_beside("histograms.jsonl").append_line(msgspec.json.encode(row))

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._is_closed = True
        self._writer.close()
        for file in self._beside.values():
            file.close()

    def _append(self, step: int, metrics: Mapping[str, float], **place: bool) -> None:
        values = {name: float(value) for name, value in metrics.items() if name not in RESERVED}
        if len(values) < len(metrics) and not self._has_warned:
            self._has_warned = True
            names = sorted(RESERVED.intersection(metrics))
            log.warning("reserved_metric_names", path=str(self._writer.path), left_out=names)
        self._writer.append({"step": _checked_step(step), "time": round(self._clock(), 3), **place, **values})

    def _file_beside(self, name: str) -> JsonLinesWriter:
        path = self._writer.path.with_name(name)
        if self._is_closed:
            raise NotReadyError(f"{path} is closed; create a new JsonlTracker to append more.")
        if name not in self._beside:
            self._beside[name] = JsonLinesWriter(path)
        return self._beside[name]


def as_step(value: Any) -> int | None:
    """Return a value as a step if it is an integer within int64, or a float such as 3.0; else None."""
    if type(value) is not int:
        if type(value) is not float or not value.is_integer():
            return None
        value = int(value)
    return value if -(2**63) <= value < 2**63 else None


def read_step_lines(
    path: Path, *, decode: Callable[[bytes], dict[str, Any] | None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step of each line of a file, and the rest of the line.

    Lines with data but without a step are skipped, with one warning.

    Args:
        path: A file of JsonlTracker.
        decode: As in `read_json_lines`.

    Raises:
        OSError: The file cannot be read.
    """
    decode = parse_line if decode is None else decode
    number = num_bad = first_bad = 0

    def numbered(line: bytes) -> dict[str, Any] | None:
        nonlocal number
        number += 1
        return decode(line)

    for row in read_json_lines(path, decode=numbered):
        step = as_step(row.pop("step", None))
        if step is not None:
            yield step, row
        elif row.keys() - RESERVED:
            num_bad += 1
            first_bad = first_bad or number
    if num_bad:
        warn_of_lines_without_step(path, count=num_bad, first_line=first_bad)


def warn_of_lines_without_step(path: Path, *, count: int, first_line: int) -> None:
    """Warn that lines of a file have metrics without an integer step."""
    log.warning("lines_without_step", path=str(path), count=count, first_line=first_line)


def _checked_step(step: SupportsIndex) -> int:
    try:
        number = int(operator.index(step))
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise DataError(f"a step must be an integer >= 0, the number of finished optimizer steps; found {step!r}.")
    return number


@converts_arguments
def read_metrics(path: Path, *, with_replaced: bool = False) -> list[MetricRow]:
    """Read the metrics of a run, which may still be writing.

    A run that was killed and resumed from an older checkpoint repeats steps. A line replaces earlier lines of its own
    and later steps, so the result is the current history, with increasing steps. Late metrics are merged into their
    step.

    Args:
        path: A file of JsonlTracker.
        with_replaced: Whether to keep replaced lines, in the order of the file.
    """
    rows: list[MetricRow] = []
    for step, line in read_step_lines(path):
        is_late = line.pop(LATE, False) is True
        row = _metric_row(step, line)
        if is_late:
            _add_late(rows, row, is_rising=not with_replaced)
            continue
        while not with_replaced and rows and rows[-1].step >= row.step:
            rows.pop()
        rows.append(row)
    return rows


@converts_arguments
def read_generations(path: Path, *, with_replaced: bool = False) -> list[GenerationTable]:
    """Read the tables of samples of a run, which may still be writing.

    As in `read_metrics`, a table replaces earlier ones of its name at its own and later steps. Lines without a sample
    are skipped.

    Args:
        path: A file of JsonlTracker.
        with_replaced: Whether to keep replaced tables, in the order of the file.
    """
    tables: list[tuple[GenerationTable, list[GenerationSample]]] = []
    for step, line in read_step_lines(path):
        read = _generation_row(step, line)
        if read is None:
            continue
        index, row, sample = read
        last = tables[-1][0] if tables else None
        if index == 0 or last is None or (last.step, last.name, last.time) != (row.step, row.name, row.time):
            if not with_replaced:
                tables = [one for one in tables if one[0].name != row.name or one[0].step < row.step]
            tables.append((row, []))
        tables[-1][1].append(sample)
    return [replace(table, samples=tuple(samples)) for table, samples in tables]


@converts_arguments
def read_histograms(path: Path, *, with_replaced: bool = False) -> list[StepHistograms]:
    """Read the distributions of a run, which may still be writing.

    As in `read_metrics`, a line replaces earlier ones of its own and later steps. Invalid histograms are skipped.

    Args:
        path: `histograms.jsonl` of JsonlTracker.
        with_replaced: Whether to keep replaced lines, in the order of the file.
    """
    rows: list[StepHistograms] = []
    for step, line in read_step_lines(path):
        sketches = line.get("histograms")
        if not isinstance(sketches, dict):
            continue
        while not with_replaced and rows and rows[-1].step >= step:
            rows.pop()
        found = {name: histogram for name, sketch in sketches.items() if (histogram := _histogram(sketch)) is not None}
        rows.append(StepHistograms(step=step, time=number_or_nan(line.get("time")), histograms=found))
    return rows


def _histogram(sketch: Any) -> Histogram | None:
    try:
        return Histogram.from_json(sketch)
    except DataError:
        return None


def _add_late(rows: list[MetricRow], late: MetricRow, *, is_rising: bool) -> None:
    """Merge late metrics into the rows of their step."""
    start = bisect.bisect_left(rows, late.step, key=lambda row: row.step) if is_rising else 0
    for index in range(start, start + 1 if is_rising else len(rows)):
        if index < len(rows) and rows[index].step == late.step:
            rows[index] = replace(rows[index], metrics={**rows[index].metrics, **late.metrics})


def _generation_row(step: int, line: dict[str, Any]) -> tuple[int, GenerationTable, GenerationSample] | None:
    index, name = line.get("index"), line.get("name")
    if type(index) is not int or not isinstance(name, str):
        return None
    try:
        sample = GenerationSample.from_json(line)
    except DataError:
        return None
    return index, GenerationTable(step=step, name=name, time=number_or_nan(line.get("time")), samples=()), sample


def _metric_row(step: int, line: dict[str, Any]) -> MetricRow:
    written = line.pop("time", None)
    metrics = {name: number_or_nan(value) for name, value in line.items()}
    return MetricRow(step=step, time=number_or_nan(written), metrics=metrics)
