"""metrics.jsonl and histograms.jsonl with one line per step, generations.jsonl with one per sample; append-only."""

import bisect
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

import msgspec
import structlog

from rl_core.errors import DataError, NotReadyError
from rl_core.record_fields import converts_arguments
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import JsonLinesWriter, number_or_nan, numbered_json_lines, parse_line

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
    samples: list[GenerationSample]


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
            file.append({"step": step, "time": written, "name": name, "index": index, **sample.to_json()})

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
        for file in (self._writer, *self._beside.values()):
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
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def read_step_lines(
    path: Path, *, decode: Callable[[bytes], dict[str, Any] | None] = parse_line
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step of each line of a file, and the rest of the line.

    Lines with data but without a step are skipped, with one warning.

    Args:
        path: A file of JsonlTracker.
        decode: As in `read_json_lines`.

    Raises:
        OSError: The file cannot be read.
    """
    num_bad = first_bad = 0
    for number, row in numbered_json_lines(path, decode=decode):
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
def read_metrics(path: Path) -> list[MetricRow]:
    """Read the metrics of a run, which may still be writing.

    A run that was killed and resumed from an older checkpoint repeats steps. A line replaces earlier lines of its own
    and later steps, so the result is the current history, with increasing steps. Late metrics are merged into their
    step.

    Args:
        path: A file of JsonlTracker.
    """
    rows: list[MetricRow] = []
    for step, line in read_step_lines(path):
        is_late, written = line.pop(LATE, False) is True, number_or_nan(line.pop("time", None))
        metrics = {name: number_or_nan(value) for name, value in line.items()}
        if is_late:
            place = bisect.bisect_left(rows, step, key=lambda row: row.step)
            if place < len(rows) and rows[place].step == step:
                rows[place] = replace(rows[place], metrics=rows[place].metrics | metrics)
            continue
        while rows and rows[-1].step >= step:
            rows.pop()
        rows.append(MetricRow(step=step, time=written, metrics=metrics))
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
    tables: list[GenerationTable] = []
    for step, line in read_step_lines(path):
        index, name, written = line.get("index"), line.get("name"), number_or_nan(line.get("time"))
        if type(index) is not int or not isinstance(name, str):
            continue
        try:
            sample = GenerationSample.from_json(line)
        except DataError:
            continue
        last = tables[-1] if tables else None
        if index == 0 or last is None or (last.step, last.name, last.time) != (step, name, written):
            if not with_replaced:
                tables = [table for table in tables if table.name != name or table.step < step]
            tables.append(GenerationTable(step=step, name=name, time=written, samples=[]))
        tables[-1].samples.append(sample)
    return tables


@converts_arguments
def read_histograms(path: Path) -> list[StepHistograms]:
    """Read the distributions of a run, which may still be writing.

    As in `read_metrics`, a line replaces earlier ones of its own and later steps. Invalid histograms are skipped.

    Args:
        path: `histograms.jsonl` of JsonlTracker.
    """
    rows: list[StepHistograms] = []
    for step, line in read_step_lines(path):
        if not isinstance(line.get("histograms"), dict):
            continue
        while rows and rows[-1].step >= step:
            rows.pop()
        row = StepHistograms(step=step, time=number_or_nan(line.get("time")), histograms={})
        rows.append(row)
        for name, state in line["histograms"].items():
            with suppress(DataError):
                row.histograms[name] = Histogram.from_json(state)
    return rows
