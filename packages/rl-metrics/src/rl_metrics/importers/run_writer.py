"""Writer of an imported run's folder."""

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

MAX_FALLS = 10
"""Maximum number of warnings per file about steps that go back."""

MAX_NAMES = 1_000
"""Maximum number of listed names without a counterpart here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import.

    Attributes:
        folder: Folder of the run.
        num_rows: Number of lines of metrics read.
        num_rollouts: Number of trajectories.
        num_generations: Number of validation samples.
        other: Original names without a counterpart here; at most MAX_NAMES.
    """

    folder: Path
    num_rows: int
    num_rollouts: int
    num_generations: int
    other: tuple[str, ...]


class RunWriter:
    """Writes a run to a temporary folder, which `finish` moves into place; leaving the `with` before deletes it."""

    def __init__(self, into: Path, *, trainer: str, names: Callable[[str], tuple[str, ...]]) -> None:
        """Create the temporary folder.

        Args:
            into: Folder of the run: new, empty, or of an earlier import, which is replaced.
            trainer: Name of the trainer, such as "verl".
            names: Returns the names here of a metric there.

        Raises:
            DataError: The folder has other contents.
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
        """Start a file; later additions belong to it. Warns if the previous file seems to be the later one.

        Args:
            file: File with the metrics of one launch of the run.
            names: Returns the names here of a metric in this file; None uses those of the run.
        """
        self._file = file
        self._num_falls = 0
        self._is_begun = False
        self._step_of_file = None
        self._names = self._names_of_run if names is None else names

    def add_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Add logged values of a step, in the order of logging.

        Values of one step logged in parts are combined. A metric that the step already has comes from a resumed launch:
        as in `read_metrics`, it replaces the step and all later ones. Within one file this causes a warning, because a
        line of a response can look like a step.

        Args:
            step: The trainer's own step number.
            values: Values by original name; values that are not numbers are ignored.
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
        """Add the trajectories of one step, written at this time (seconds since the epoch)."""
        if not rows:
            return
        if self._rollouts is None:
            self._rollouts = RolloutLog(self._aside / "rollouts.jsonl", clock=lambda: self._written)
        self._written = written
        self._rollouts.write(rows)
        self._num_rollouts += len(rows)

    def finish(self, files: Sequence[Path], *, is_finished: bool = False) -> Imported:
        """Move the run into its folder.

        Args:
            files: Files that it was read from.
            is_finished: Whether these record that the training finished.

        Raises:
            DataError: The files have neither metrics nor responses.
        """
        self._flush()
        if not self._num_rows + self._num_rollouts + self._num_generations:
            where = f"in {', '.join(map(str, files))}" if files else "because no file or folder was named"
            nothing = f"no metrics or responses of {self._trainer} found {where}."
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
        """Warn if a file goes back to an earlier step, which replaces the steps from there on."""
        if self._file is None or self._step_of_file is None or step >= self._step_of_file:
            return
        self._num_falls += 1
        if self._num_falls <= MAX_FALLS:
            log.warning(
                "steps_begin_again",
                file=str(self._file),
                step=step,
                after_step=self._step_of_file,
                advice="treated as a resumed launch, which replaces the steps from there on; if it is text of a "
                "response, cut it from the file",
            )

    def _warn_of_order(self) -> None:
        """Warn if the newest launch starts before the previous one, whose steps it replaces."""
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
                advice="steps of a later file replace those of an earlier one; name the oldest launch first",
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
                (self._into / name).unlink(missing_ok=True)  # of an earlier import

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
        raise DataError(f"{folder} must be a new folder, or that of an earlier import; found other files in it.")
