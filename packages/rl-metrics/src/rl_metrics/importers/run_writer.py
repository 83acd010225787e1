"""Writes the folder of an imported run."""

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from rl_core.errors import DataError
from rl_metrics.importers.naming import OTHER
from rl_metrics.importers.recognition import misplaced
from rl_metrics.run_files.events import IMPORTED, EventLog, read_events
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.run_files.rollout_log import RolloutLog, RolloutRow
from rl_metrics.run_files.run_record import FILES
from rl_metrics.trackers.jsonl import JsonlTracker

log = structlog.get_logger(__name__)

"""The first event of a run that was imported: its trainer, files, and the names without a meaning here."""

MAX_FALLS = 10
"""Of the falls of a file's steps, so many are warned of."""

MAX_NAMES = 1_000
"""Of the names without a meaning here, so many are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import.

    Attributes:
        folder: Of the run.
        num_rows: Lines of metrics that were read.
        num_rollouts: Trajectories.
        num_generations: Samples of validations.
        other: Names without a meaning here, as they are called there; at most MAX_NAMES.
    """

    folder: Path
    num_rows: int
    num_rollouts: int
    num_generations: int
    other: tuple[str, ...]


class RunWriter:
    """Writes a run aside; `finish` puts it into place, and leaving the `with` without it leaves no trace."""

    def __init__(self, into: Path, *, trainer: str, names: Callable[[str], tuple[str, ...]]) -> None:
        """Begin a run.

        Args:
            into: Its folder: new, empty, or of a run that was imported before, which it replaces.
            trainer: Such as "verl".
            names: Gives the names here of a metric there.

        Raises:
            DataError: The folder has something else in it.
        """
        into = into.absolute()
        _require_free(into)
        into.parent.mkdir(parents=True, exist_ok=True)
        self._into = into
        self._trainer = trainer
        self._names = self._names_of_run = names
        self._aside = Path(tempfile.mkdtemp(prefix=f".{into.name}.", dir=into.parent))
        self._metrics = JsonlTracker(self._aside / "metrics.jsonl", clock=lambda: math.nan)
        self._rollouts: RolloutLog | None = None
        self._file: Path | None = None
        self._num_falls = 0
        self._is_begun = False
        self._step_of_file: int | None = None
        self._starts: list[tuple[Path, int]] = []
        self._written = 0.0
        self._step: int | None = None
        self._row: dict[str, float] = {}
        self._known: dict[int, frozenset[str]] = {}
        self._layouts: dict[frozenset[str], frozenset[str]] = {}
        self._other: dict[str, None] = {}
        self._num_rows = self._num_rollouts = self._num_generations = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
        shutil.rmtree(self._aside, ignore_errors=True)

    def begin_attempt(self, file: Path, *, names: Callable[[str], tuple[str, ...]] | None = None) -> None:
        """What is added from now on is of this file; a warning says when the one before it seems to be the later one.

        Args:
            file: With the metrics of one launch of the run.
            names: Gives the names here of a metric in this file; those of the run when left out.
        """
        self._file = file
        self._num_falls = 0
        self._is_begun = False
        self._step_of_file = None
        self._names = self._names_of_run if names is None else names

    def add_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Add what was logged of a step, in the order in which it was logged.

        What was logged of one step in parts is put together. A metric that the step has already was logged by a
        resumed launch: as in `read_metrics`, it takes the place of the step and of all later ones. A warning says so
        where that is within one file, as a line of a response that looks like a step does it too.

        Args:
            step: From the trainer's own count.
            values: By the names there; what is no number is left out.
        """
        row = self._translated(values)
        if not row or step < 0:
            return
        self._begin(step)
        self._num_rows += 1
        if step == self._step and not row.keys() & self._row.keys():
            self._row |= row
            self._step_of_file = step
            return
        self._flush()
        is_earlier = self._step is not None and step < self._step
        if is_earlier and step in self._known and not row.keys() & self._known[step]:
            self._metrics.log_late(step, row)
            self._known[step] |= row.keys()
            return
        self._warn_of_fall(step)
        self._step, self._row, self._step_of_file = step, row, step

    def add_generations(self, step: int, samples: Sequence[GenerationSample]) -> None:
        """Add the samples of a validation."""
        if not samples:
            return
        self._metrics.log_generations(step, "val/generations", samples)
        self._num_generations += len(samples)

    def add_rollouts(self, rows: Sequence[RolloutRow], *, written: float) -> None:
        """Add the trajectories of one step, which were written at this time (seconds since the epoch)."""
        if not rows:
            return
        if self._rollouts is None:
            self._rollouts = RolloutLog(self._aside / "rollouts.jsonl", clock=lambda: self._written)
        self._written = written
        self._rollouts.write(rows)
        self._num_rollouts += len(rows)

    def finish(self, files: Sequence[Path], *, is_finished: bool = False) -> Imported:
        """Put the run into its folder.

        Args:
            files: That it was read from.
            is_finished: True where these say that the training came to its end.

        Raises:
            DataError: Nothing was found in the files.
        """
        self._flush()
        if not self._num_rows + self._num_rollouts + self._num_generations:
            where = f"in {', '.join(map(str, files))}" if files else "there, as no file and no folder was named"
            nothing = f"no metrics and no responses of {self._trainer} are {where}."
            raise DataError(misplaced(files, trainer=self._trainer) or nothing)
        other = tuple(sorted(self._other))
        self._write_events(files, other, is_finished)
        self._close()
        self._put_into_place()
        return Imported(
            folder=self._into,
            num_rows=self._num_rows,
            num_rollouts=self._num_rollouts,
            num_generations=self._num_generations,
            other=other,
        )

    def _translated(self, values: Mapping[str, Any]) -> dict[str, float]:
        row: dict[str, float] = {}
        for theirs, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            for name in self._names(theirs):
                if name.startswith(OTHER) and len(self._other) < MAX_NAMES:
                    self._other[name.removeprefix(OTHER)] = None
                row.setdefault(name, number_or_nan(value))
        return row

    def _begin(self, step: int) -> None:
        if self._file is not None and not self._is_begun:
            self._is_begun = True
            self._starts.append((self._file, step))
            self._warn_of_order()

    def _warn_of_fall(self, step: int) -> None:
        """Say it where a file goes back to an earlier step, and so replaces what it had from there on."""
        if self._file is None or self._step_of_file is None or step >= self._step_of_file:
            return
        self._num_falls += 1
        if self._num_falls <= MAX_FALLS:
            log.warning(
                "steps_begin_again",
                file=str(self._file),
                step=step,
                after_step=self._step_of_file,
                advice="taken as a resumed launch, which replaces the steps from there on; if it is text of a "
                "response, cut it from the file",
            )

    def _warn_of_order(self) -> None:
        """Say it where the newest launch begins before the one before it, whose steps it replaces."""
        if len(self._starts) < 2:
            return
        (before, first_before), (file, first) = self._starts[-2:]
        if first < first_before:
            log.warning(
                "attempts_out_of_order",
                file=str(file),
                first_step=first,
                before=str(before),
                its_first_step=first_before,
                advice="what a later file has takes the place of an earlier one's steps: give the oldest launch first",
            )

    def _flush(self) -> None:
        if self._step is None or not self._row:
            return
        self._metrics.log(self._step, self._row)
        names = frozenset(self._row)
        self._known[self._step] = self._layouts.setdefault(names, names)
        self._row = {}

    def _write_events(self, files: Sequence[Path], other: Sequence[str], is_finished: bool) -> None:
        events = EventLog(self._aside / "events.jsonl")
        events.write(IMPORTED, trainer=self._trainer, files=[str(file) for file in files], other=list(other))
        if is_finished:
            events.write("run_finished", trainer=self._trainer)
        events.close()

    def _put_into_place(self) -> None:
        if not self._num_rows:
            (self._aside / "metrics.jsonl").unlink()
        self._into.mkdir(exist_ok=True)
        for name in FILES:
            if (self._aside / name).exists():
                (self._aside / name).replace(self._into / name)
            else:
                (self._into / name).unlink(missing_ok=True)  # of an import before

    def _close(self) -> None:
        self._metrics.close()
        if self._rollouts is not None:
            self._rollouts.close()


def _require_free(folder: Path) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    events = folder / "events.jsonl"
    first = next(iter(read_events(events)), {}) if events.is_file() else {}
    if first.get("event") != IMPORTED:
        raise DataError(f"{folder} must be a new folder, or one of a run that was imported before; it has other files.")
