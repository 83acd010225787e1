"""The folder of a run, each file read when it is first asked for."""

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
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
from rl_metrics.hang.report import HANG_FILE, HangReport, read_hang_report
from rl_metrics.run_files.events import BEGUN, ENDED, IMPORTED, read_events
from rl_metrics.run_files.history import History, read_history
from rl_metrics.run_files.json_lines import number_or_nan, parse_line, read_json_lines
from rl_metrics.run_files.rollout_log import RolloutRow, read_rollouts, without_surrogates
from rl_metrics.trackers.jsonl import (
    GenerationTable,
    StepHistograms,
    read_generations,
    read_histograms,
)

log = structlog.get_logger(__name__)

METRICS = "metrics.jsonl"
MAX_DOCUMENT_BYTES = 64 << 20
"""Larger settings and summaries are not read."""

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
"""Any of them makes a folder one of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """What the policy thinks at one token.

    Attributes:
        step: Optimizer steps done.
        time: Seconds since the epoch when it was written; NaN where that is unknown.
        policy_version: Of the policy that was asked.
        probe: Its name, the same at every step.
        prompt: As text.
        response: As text: what is asked about.
        position: Of the token in the response, from 0.
        token: As text.
        logprob: Of the token; NaN where that is unknown.
        candidates: Texts and logprobs of the likeliest tokens there, likeliest first.
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


_Dated = GenerationTable | StepHistograms | ProbeRow | RolloutRow
"""What was written of a step."""
_AnyDated = TypeVar("_AnyDated", bound=_Dated)


class RunRecord:
    """What a run wrote, also one that is still writing, or was imported; files that are not there are empty.

    Only regular files in the folder are read: a pipe, a device, or a link that leads out of the folder is left out,
    with a warning.
    """

    def __init__(self, folder: Path, *, metrics: str = METRICS) -> None:
        """Nothing is read yet.

        Args:
            folder: Of the run.
            metrics: Name of the file of its metrics; with another than the usual one, the run is that file alone.
        """
        self.folder = folder
        self.name = folder.resolve().name if metrics == METRICS else Path(metrics).stem
        self._metrics = metrics

    @cached_property
    def history(self) -> History:
        """The metrics by step."""
        path = self._file(self._metrics)
        if path is None:
            return History(steps=np.zeros(0, dtype=np.int64), times=np.zeros(0), values={})
        return read_history(path)

    @cached_property
    def events(self) -> tuple[dict[str, Any], ...]:
        """The events, in their order."""
        path = self._file("events.jsonl")
        return () if path is None else tuple(read_events(path))

    @cached_property
    def generations(self) -> tuple[GenerationTable, ...]:
        """The samples of each validation."""
        path = self._file("generations.jsonl")
        return () if path is None else self._standing(read_generations(path))

    @cached_property
    def histograms(self) -> tuple[StepHistograms, ...]:
        """The distributions by rising step."""
        path = self._file("histograms.jsonl")
        return () if path is None else self._standing(read_histograms(path))

    @cached_property
    def probes(self) -> tuple[ProbeRow, ...]:
        """What the policy thinks at chosen tokens, by rising step."""
        path = self._file("probes.jsonl")
        return () if path is None else self._standing(_standing_probes(read_json_lines(path, decode=_probe_line)))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the run; tables are dicts."""
        content = self._document("settings.toml")
        try:
            return parse_toml(content, where="it")
        except DataError as error:
            log.warning("unreadable_file", path=str(self.folder / "settings.toml"), error=str(error))
            return {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What the run said when it ended."""
        return self._json_document("summary.json")

    @cached_property
    def hang(self) -> HangReport | None:
        """What each role did when nothing had happened for too long."""
        path = self._file(HANG_FILE)
        try:
            return None if path is None else read_hang_report(path)
        except DataError as error:
            log.warning("unreadable_file", path=str(path), error=str(error))
            return None

    @property
    def is_imported(self) -> bool:
        """Whether another trainer trained it."""
        return any(event["event"] == IMPORTED for event in self.events)

    @property
    def is_finished(self) -> bool:
        """Whether the newest launch ended by itself: not while one runs, nor after it was stopped, failed or killed.

        Where events tell nothing, a summary does.
        """
        for event in reversed(self.events):
            if event["event"] in (*BEGUN, *ENDED):
                return bool(event["event"] == "run_finished")
        return bool(self.summary)

    @cached_property
    def health(self) -> dict[str, Any]:
        """The newest verdict, as `Verdict.to_json` gave it."""
        return self._json_document("health.json")

    def rollouts(self) -> Iterator[RolloutRow]:
        """The trajectories, one at a time, by rising step."""
        path = self._file("rollouts.jsonl")
        return iter(()) if path is None else filter(self._stands, read_rollouts(path))

    def most_rollouts(self) -> int:
        """How many trajectories there are at most: quickly counted, replaced and torn ones too."""
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
        """When the newest launch began; NaN where that is unknown."""
        times = [number_or_nan(event.get("time")) for event in self.events if event["event"] in BEGUN]
        return times[-1] if times else math.nan

    def _stands(self, row: _Dated) -> bool:
        """False of what an earlier launch wrote of steps that a resume took back, and that were not done again yet."""
        steps = self.history.steps
        return not (len(steps) and row.step > steps[-1] and row.time < self._began)

    def _standing(self, rows: Iterable[_AnyDated]) -> tuple[_AnyDated, ...]:
        return tuple(filter(self._stands, rows))

    def _json_document(self, name: str) -> dict[str, Any]:
        content = self._document(name)
        if not content:
            return {}
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            log.warning("unreadable_file", path=str(self.folder / name), error=str(error))
            return {}
        return document if isinstance(document, dict) else {}

    def _document(self, name: str) -> bytes:
        path = self._file(name)
        if path is None:
            return b""
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
        if len(content) > MAX_DOCUMENT_BYTES:
            log.warning("unreadable_file", path=str(path), error=f"it is larger than {MAX_DOCUMENT_BYTES} bytes")
            return b""
        return content

    def _file(self, name: str) -> Path | None:
        if METRICS != self._metrics != name:
            return None  # what lies beside a file of another name may be of other runs
        path = self.folder / name
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # such as links in a circle, or no right to read
            log.warning("unreadable_file", path=str(path), error=str(error))
            return None
        if not stat.S_ISREG(mode):
            why = "it is no regular file"
        elif not path.resolve().is_relative_to(self.folder.resolve()):
            why = "it is a link that leads out of the run's folder"
        elif not os.access(path, os.R_OK):
            why = "there is no right to read it"
        else:
            return path
        log.warning("unreadable_file", path=str(path), error=why)
        return None


@converts_arguments
def open_run(path: Path) -> RunRecord:
    """The record of a run.

    Args:
        path: Its folder, or a file of metrics as JsonlTracker writes it.

    Raises:
        DataError: There is no such folder or file, or it is none of a run.
    """
    if path.is_file():
        path = path.resolve()  # one that is named may be a link
        return RunRecord(path.parent, metrics=path.name)
    if not path.is_dir():
        raise DataError(f"{path} must be the folder of a run, or its {METRICS}; there is no such folder or file.")
    if not has_begun(path):
        raise DataError(f"{path} must be the folder of a run; it has none of {', '.join(FILES)}.")
    return RunRecord(path)


def has_begun(path: Path) -> bool:
    """True where a run has written something: at its folder, or at a file of metrics."""
    return path.is_file() or any((path / name).is_file() for name in FILES)


def _standing_probes(lines: Iterable[dict[str, Any]]) -> list[ProbeRow]:
    """The newest history: a lower step, or a token already probed at this step, restarts the step."""
    rows: list[ProbeRow] = []
    asked: set[tuple[str, int]] = set()
    for line in lines:
        row = _probe_row(line)
        if row is None:
            continue
        place = (row.probe, row.position)
        if rows and (row.step != rows[-1].step or place in asked):
            while rows and rows[-1].step >= row.step:
                rows.pop()
            asked.clear()
        asked.add(place)
        rows.append(row)
    return rows


def _probe_line(line: bytes) -> dict[str, Any] | None:
    return parse_line(without_surrogates(line))


def _probe_row(line: Mapping[str, Any]) -> ProbeRow | None:
    unknown = {name: math.nan for name in ("time", "logprob") if line.get(name) is None}
    try:
        candidates = [(text, math.nan if logprob is None else logprob) for text, logprob in line.get("candidates", ())]
        return msgspec.convert({**line, **unknown, "candidates": candidates}, ProbeRow)
    except (TypeError, ValueError, OverflowError, RecursionError):  # ValueError: msgspec's are, too
        return None
