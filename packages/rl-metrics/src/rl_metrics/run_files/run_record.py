"""The record of a run, whose files are read on first access."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import structlog

from rl_core.errors import DataError
from rl_core.files import parse_toml
from rl_core.record_fields import converts_arguments
from rl_metrics.hang import HANG_FILE, HangReport, read_hang_report
from rl_metrics.run_files.events import BEGUN, ENDED, IMPORTED, read_events
from rl_metrics.run_files.history import History, read_history
from rl_metrics.run_files.json_lines import number_or_nan, numbered_json_lines, parse_line
from rl_metrics.run_files.rollout_log import RolloutRow, read_rollouts
from rl_metrics.trackers.jsonl import GenerationTable, StepHistograms, read_generations, read_histograms

log = structlog.get_logger(__name__)

METRICS = "metrics.jsonl"

FILES = (
    METRICS,
    "events.jsonl",
    "rollouts.jsonl",
    "generations.jsonl",
    "histograms.jsonl",
    "probes.jsonl",
    "settings.toml",
    "summary.json",
    HANG_FILE,
    "health.json",
)
"""Files of a run; a folder with any of them is a run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """The policy's prediction at one token.

    Attributes:
        step: Optimizer steps done.
        time: Time of writing, in seconds since the epoch; NaN if unknown.
        policy_version: Version of the probed policy.
        probe: Name of the probe, the same at every step.
        prompt: Prompt as text.
        response: Probed response as text.
        position: Index of the token in the response, from 0.
        token: Token as text.
        logprob: Logprob of the token; NaN if unknown.
        candidates: Texts and logprobs of the top tokens at this position, most likely first.
    """

    step: int
    time: float
    policy_version: int = 0
    probe: str
    prompt: str
    response: str
    position: int
    token: str
    logprob: float
    candidates: tuple[tuple[str, float], ...] = ()


T = TypeVar("T")


class RunRecord:
    """Files of a run, which may still be writing or be imported.

    Missing files count as empty. A file that cannot be read is skipped with a warning.
    """

    def __init__(self, folder: Path, *, metrics: str = METRICS) -> None:
        """Store the folder without reading.

        Args:
            folder: Folder of the run.
            metrics: Name of the metrics file; with another than metrics.jsonl, the run consists of only that file.
        """
        self.folder = folder
        self.name = folder.resolve().name if metrics == METRICS else Path(metrics).stem
        self._metrics = metrics

    @cached_property
    def history(self) -> History:
        """Metrics by step."""
        path = self._file(self._metrics)
        if path is None:
            return History(steps=np.zeros(0, dtype=np.int64), times=np.zeros(0), values={})
        return read_history(path)

    @cached_property
    def events(self) -> tuple[dict[str, Any], ...]:
        """Events, in order."""
        return tuple(self._rows("events.jsonl", read_events))

    @cached_property
    def generations(self) -> tuple[GenerationTable, ...]:
        """Samples of each validation."""
        return tuple(filter(self._stands, self._rows("generations.jsonl", read_generations)))

    @cached_property
    def histograms(self) -> tuple[StepHistograms, ...]:
        """Distributions, ordered by step."""
        return tuple(filter(self._stands, self._rows("histograms.jsonl", read_histograms)))

    @cached_property
    def probes(self) -> tuple[ProbeRow, ...]:
        """The policy's predictions at chosen tokens, ordered by step."""
        return tuple(filter(self._stands, self._rows("probes.jsonl", _standing_probes)))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the run; tables are dicts."""
        return self._document("settings.toml", lambda path: parse_toml(path.read_bytes(), where="it")) or {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Summary that the run wrote at its end."""
        return self._document("summary.json", _read_object) or {}

    @cached_property
    def hang(self) -> HangReport | None:
        """Report of each role's activity after too long without progress; None without one."""
        return self._document(HANG_FILE, read_hang_report)

    @property
    def is_imported(self) -> bool:
        """Whether the run was imported from another trainer."""
        return any(event["event"] == IMPORTED for event in self.events)

    @property
    def is_finished(self) -> bool:
        """Whether the newest launch finished: it is not running, and was not stopped, failed or killed.

        Without such events, a run with a summary counts as finished.
        """
        for event in reversed(self.events):
            if event["event"] in (*BEGUN, *ENDED):
                return bool(event["event"] == "run_finished")
        return bool(self.summary)

    @cached_property
    def health(self) -> dict[str, Any]:
        """Newest verdict, as an object of `Verdict.to_json`."""
        return self._document("health.json", _read_object) or {}

    def rollouts(self) -> Iterator[RolloutRow]:
        """Return an iterator over the trajectories, ordered by step."""
        return filter(self._stands, self._rows("rollouts.jsonl", read_rollouts))

    def most_rollouts(self) -> int:
        """Return an upper bound of the number of trajectories, including replaced and truncated ones; fast."""
        path = self._file("rollouts.jsonl")
        if path is None:
            return 0
        count, last = 0, b"\n"
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                count, last = count + block.count(b"\n"), block
        return count + (not last.endswith(b"\n"))

    @cached_property
    def _began(self) -> float:
        """Start time of the newest launch, in seconds since the epoch; NaN if unknown."""
        times = [number_or_nan(event.get("time")) for event in self.events if event["event"] in BEGUN]
        return times[-1] if times else math.nan

    def _stands(self, row: GenerationTable | StepHistograms | ProbeRow | RolloutRow) -> bool:
        """Return False for rows of an earlier launch whose steps a resume undid and has not repeated yet."""
        steps = self.history.steps
        return not (len(steps) and row.step > steps[-1] and row.time < self._began)

    def _rows(self, name: str, read: Callable[[Path], Iterable[T]]) -> Iterable[T]:
        path = self._file(name)
        return () if path is None else read(path)

    def _document(self, name: str, read: Callable[[Path], T]) -> T | None:
        """Read a whole file; None if it is missing, or cannot be read."""
        path = self._file(name)
        try:
            return None if path is None else read(path)
        except DataError as error:
            log.warning("unreadable_file", path=str(path), error=str(error))
            return None

    def _file(self, name: str) -> Path | None:
        if METRICS != self._metrics != name:
            return None  # files next to a file of another name may belong to other runs
        path = self.folder / name
        try:
            path.open("rb").close()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # such as missing permissions
            log.warning("unreadable_file", path=str(path), error=str(error))
            return None
        return path


@converts_arguments
def open_run(path: Path) -> RunRecord:
    """Open the record of a run.

    Args:
        path: Folder of the run, or a metrics file of JsonlTracker.

    Raises:
        DataError: The path does not exist, or is not a run's folder.
    """
    if path.is_file():
        path = path.resolve()  # the named file may be a link
        return RunRecord(path.parent, metrics=path.name)
    if not path.is_dir():
        raise DataError(f"{path} must be the folder of a run, or its {METRICS}; there is no such folder or file.")
    if not has_begun(path):
        raise DataError(f"{path} must be the folder of a run; found none of {', '.join(FILES)} in it.")
    return RunRecord(path)


def has_begun(path: Path) -> bool:
    """Return True if a run's folder has any of its files, or if the path is a file."""
    return path.is_file() or any((path / name).is_file() for name in FILES)


def _read_object(path: Path) -> dict[str, Any]:
    content = parse_line(path.read_bytes())
    if content is None:
        raise DataError("it must be a JSON object")
    return content


def _standing_probes(path: Path) -> list[ProbeRow]:
    """Return the newest rows: a lower step, or a token already probed at this step, restarts the step."""
    rows: list[ProbeRow] = []
    probed: set[tuple[str, int]] = set()
    for _, line in numbered_json_lines(path):
        row = _probe_row(line)
        if row is None:
            continue
        token = (row.probe, row.position)
        if rows and (row.step != rows[-1].step or token in probed):
            while rows and rows[-1].step >= row.step:
                rows.pop()
            probed.clear()
        probed.add(token)
        rows.append(row)
    return rows


def _probe_row(line: Mapping[str, Any]) -> ProbeRow | None:
    unknown = {name: math.nan for name in ("time", "logprob") if line.get(name) is None}
    try:
        candidates = [(text, math.nan if logprob is None else logprob) for text, logprob in line.get("candidates", ())]
        return msgspec.convert({**line, **unknown, "candidates": candidates}, ProbeRow)
    except (TypeError, ValueError, OverflowError, RecursionError):  # msgspec's errors are ValueErrors too
        return None
