"""Metrics of another trainer by our names, and the folder of an imported run."""

import functools
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import DataError
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.importers.dumped import StepResponses, as_rollouts, as_samples
from rl_metrics.importers.recognition import misplaced
from rl_metrics.run_files.events import IMPORTED, EventLog, read_events
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.run_files.rollout_log import RolloutLog
from rl_metrics.run_files.run_record import FILES, METRICS
from rl_metrics.trackers.jsonl import JsonlTracker

log = structlog.get_logger(__name__)

OTHER = "other/"
"""Prefix of metrics without a counterpart here."""

MAX_NAME = 300
"""Maximum length of a name, in characters; longer ones are cut."""

MAX_NAMES = 1_000
"""Maximum number of listed names without a counterpart here."""

MAX_FALLS = 10
"""Maximum number of warnings per file about steps that go back."""

AS_RESUMED = (
    "treated as a resumed launch, which replaces the steps from there on; if it is text of a response, cut it from "
    "the file"
)

Names = Mapping[str, tuple[str, ...]]
"""Names here, by the name in another trainer, of metrics with the same meaning and unit.

`{source}` matches any text; any other placeholder matches one part without a slash.
"""


def translation(table: Names, *, has_our_names: bool) -> Callable[[str], tuple[str, ...]]:
    """Return a function from another trainer's name to the names here; unknown names get the prefix `OTHER`.

    Args:
        table: Translations; the first match is used.
        has_our_names: Whether names defined here mean the same in the other trainer.
    """
    entries = [(_pattern(theirs), ours) for theirs, ours in table.items()]

    @functools.lru_cache(maxsize=10_000)
    def names(name: str) -> tuple[str, ...]:
        for pattern, ours in entries:
            if match := pattern.fullmatch(name):
                return tuple(our_name.format(**match.groupdict()) for our_name in ours)
        if has_our_names and name in DEFINITIONS:
            return (name,)
        return (OTHER + name[:MAX_NAME],)

    return names


def _pattern(name: str) -> re.Pattern[str]:
    parts = [re.escape(part) for part in re.split(r"\{([a-z_]+)\}", name)]
    for index in range(1, len(parts), 2):
        parts[index] = f"(?P<{parts[index]}>{'.+' if parts[index] == 'source' else '[^/]+'})"
    return re.compile("".join(parts))


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


class ImportedMetrics:
    """Metrics by step, of one launch of a run after the other.

    Attributes:
        rows: Metrics by our names, by step.
        other: Original names without a counterpart here.
        num_rows: Number of added lines.
    """

    def __init__(self) -> None:
        """Create a run without a launch."""
        self.rows: dict[int, dict[str, float]] = {}
        self.other: dict[str, None] = {}
        self.num_rows = 0
        self._newest_start: tuple[Path, int] | None = None

    def add_launch(
        self, file: Path, lines: Iterable[tuple[int, Mapping[str, Any]]], *, names: Callable[[str], tuple[str, ...]]
    ) -> None:
        """Add the lines of a file, in the order of logging.

        Values of one step logged in parts are combined. A metric that the step already has comes from a resumed launch:
        as in `read_metrics`, it replaces the step and all later ones. Within one file this causes a warning, because a
        line of a response can look like a step.

        Args:
            file: File with the metrics of one launch of the run.
            lines: The trainer's own step numbers, and values by original name; those that are not numbers are ignored.
            names: Returns the names here of a metric there.
        """
        last: int | None = None
        num_falls = 0
        for step, values in lines:
            row = self._translated(values, names)
            if not row or step < 0:
                continue
            self.num_rows += 1
            if last is None:
                self._warn_of_order(file, step)
            known = self.rows.get(step)
            if known is not None and not row.keys() & known.keys():
                known |= row
                last = step if last is None else max(last, step)
                continue
            if last is not None and step < last:
                num_falls += 1
                if num_falls <= MAX_FALLS:
                    log.warning("steps_begin_again", file=str(file), step=step, after_step=last, advice=AS_RESUMED)
            while self.rows and next(reversed(self.rows)) >= step:
                self.rows.popitem()
            self.rows[step] = row
            last = step

    def _translated(self, values: Mapping[str, Any], names: Callable[[str], tuple[str, ...]]) -> dict[str, float]:
        row: dict[str, float] = {}
        for theirs, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            for name in names(theirs):
                if name.startswith(OTHER) and len(self.other) < MAX_NAMES:
                    self.other[name.removeprefix(OTHER)] = None
                row.setdefault(name, number_or_nan(value))
        return row

    def _warn_of_order(self, file: Path, first: int) -> None:
        """Warn if a launch starts before the previous one, whose steps it replaces."""
        before, first_before = self._newest_start or (file, first)
        self._newest_start = file, first
        if first < first_before:
            log.warning(
                "attempts_out_of_order",
                file=str(file),
                first_step=first,
                before=str(before),
                its_first_step=first_before,
                advice="steps of a later file replace those of an earlier one; name the oldest launch first",
            )


def require_free(into: Path) -> None:
    """Refuse a folder that is neither new, empty, nor of an earlier import, which is replaced.

    Raises:
        DataError: The folder has other contents.
    """
    if not into.exists() or (into.is_dir() and not any(into.iterdir())):
        return
    events = into / "events.jsonl"
    first = next(iter(read_events(events)), {}) if events.is_file() else {}
    if first.get("event") != IMPORTED:
        raise DataError(f"{into} must be a new folder, or that of an earlier import; found other files in it.")


def write_run(
    into: Path,
    *,
    trainer: str,
    files: Sequence[Path],
    metrics: ImportedMetrics,
    responses: Iterable[StepResponses],
    is_finished: bool = False,
) -> Imported:
    """Write a run to a temporary folder, and move it into place.

    Args:
        into: Folder of the run, for which `require_free` holds.
        trainer: Name of the trainer, such as "verl".
        files: Files that the run was read from.
        metrics: Metrics of all launches.
        responses: Responses of each step.
        is_finished: Whether the files record that the training finished.

    Raises:
        DataError: The files have neither metrics nor responses.
    """
    into = into.absolute()
    into.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{into.name}.", dir=into.parent) as temporary,
        closing(JsonlTracker(Path(temporary) / METRICS, clock=lambda: math.nan)) as tracker,
    ):
        folder = Path(temporary)
        for step, row in metrics.rows.items():
            tracker.log(step, row)
        num_generations = num_rollouts = 0
        for step, trained, validated, written in responses:
            if validated:
                tracker.log_generations(step, "val/generations", as_samples(step, validated, trainer=trainer))
            with closing(RolloutLog(folder / "rollouts.jsonl", clock=functools.partial(float, written))) as rollouts:
                rollouts.write(as_rollouts(step, trained))
            num_rollouts, num_generations = num_rollouts + len(trained), num_generations + len(validated)
        tracker.close()
        if not metrics.num_rows + num_rollouts + num_generations:
            where = f"in {', '.join(map(str, files))}" if files else "because no file or folder was named"
            nothing = f"no metrics or responses of {trainer} found {where}."
            raise DataError(misplaced(files, trainer=trainer) or nothing)
        other = tuple(sorted(metrics.other))
        events = EventLog(folder / "events.jsonl")
        events.write(IMPORTED, trainer=trainer, files=[str(file) for file in files], other=list(other))
        if is_finished:
            events.write("run_finished", trainer=trainer)
        events.close()
        into.mkdir(exist_ok=True)
        for name in FILES:
            if (folder / name).exists() and (folder / name).stat().st_size:
                (folder / name).replace(into / name)
            else:
                (into / name).unlink(missing_ok=True)  # of an earlier import
    return Imported(
        folder=into,
        num_rows=metrics.num_rows,
        num_rollouts=num_rollouts,
        num_generations=num_generations,
        other=other,
    )
