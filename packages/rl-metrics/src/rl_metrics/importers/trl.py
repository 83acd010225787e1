"""Import of TRL runs from the history in `trainer_state.json` and logged completions.

The names in a history show which trainer wrote it. `trl_names` translates them.

Source: `TrainerState` of transformers.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import DataError, NotReadyError
from rl_core.files import read_plain, try_arrow_files
from rl_metrics.importers.dumped import StepResponses, numbers, step_files, whole_rows
from rl_metrics.importers.recognition import misplaced, require_there
from rl_metrics.importers.run_writer import Imported, ImportedMetrics, require_free, translation, write_run
from rl_metrics.importers.trl_names import names_of
from rl_metrics.run_files.json_lines import parse_line, read_json_lines
from rl_metrics.trackers.jsonl import as_step

log = structlog.get_logger(__name__)

STATE = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-[0-9]{1,18}")
BATCH_ROWS = 256
MAX_STATE_BYTES = 1 << 30
COMPLETIONS = r"completions_([0-9]{1,18})\.(?:parquet|jsonl)"
NOT_METRICS = frozenset({"step", "epoch"})
"""Columns that are not metrics; `epoch` is a fraction, repeated in each part of a step."""

NOT_REWARDS = frozenset({"step", "mode", "prompt", "completion", "advantage", "entropy"})

PARQUET = (
    "{path} is a Parquet file, and pyarrow is not installed. Install rl-metrics[parquet] as the README says, "
    "or use completions in JSON lines."
)


def import_trl(files: Sequence[Path], into: Path, *, completions: Path | None = None) -> Imported:
    """Write the folder of a run of TRL.

    Args:
        files: `trainer_state.json`, or a folder whose newest checkpoint has one; several in the order of the run's
            launches.
        into: Folder of the run; new, or of an earlier import.
        completions: Folder of the logged completions, as Parquet (needs pyarrow) or JSON lines.

    Raises:
        DataError: The files have no data of TRL, or the folder has other contents.
        NotReadyError: A file is Parquet, and pyarrow is not installed.
        OSError: A file cannot be read.
    """
    require_free(into)
    metrics, is_finished = ImportedMetrics(), False
    for path in files:
        history = _history(path)
        lines = list(_with_step(history, path))
        is_finished = "train_runtime" in lines[-1][1] if lines else is_finished
        metrics.add_launch(path, lines, names=translation(names_of(history), has_our_names=False))
    globs = "completions_*", "*/completions_*"  # of training, or of train/ and eval/
    completed = step_files(completions, *globs, name=COMPLETIONS, such_as="completions_00010.parquet")
    return write_run(
        into,
        trainer="trl",
        files=[*files, *([completions] if completions is not None else [])],
        metrics=metrics,
        responses=(_responses(step, file) for step, file in completed),
        is_finished=is_finished,
    )


def _history(path: Path) -> list[dict[str, Any]]:
    """Return the logged rows in order.

    Raises:
        DataError: The file does not exist, or is not a trainer's state.
    """
    require_there(path, wanted=f"a {STATE} of TRL's trainers, or a folder with one")
    file = _newest_state(path) if path.is_dir() else path
    state = parse_line(read_plain(file, max_bytes=MAX_STATE_BYTES))
    history = None if state is None else state.get("log_history")
    if not isinstance(history, list):
        raise DataError(
            misplaced([file], trainer="trl")
            or f"{file} must be a {STATE} of TRL's trainers; found no log_history, or a truncated "
            "file. Printed output of a trainer is not supported."
        )
    return [row for row in history if isinstance(row, dict)]


def _with_step(history: Sequence[Mapping[str, Any]], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the steps and metrics of rows with a step, and warn about the others."""
    bad = []
    for number, row in enumerate(history, start=1):
        step = as_step(row.get("step"))
        values = {name: value for name, value in row.items() if name not in NOT_METRICS}
        if step is not None and step >= 0:
            yield step, values
        elif values:
            bad.append(number)
    if bad:
        log.warning("rows_without_step", path=str(path), count=len(bad), first_row=bad[0])


def _newest_state(folder: Path) -> Path:
    """Return the state of a folder, or of its newest checkpoint, which has the longest history.

    Raises:
        DataError: The folder has neither.
    """
    if (folder / STATE).is_file():
        return folder / STATE
    states = [file for file in folder.glob(f"checkpoint-*/{STATE}") if CHECKPOINT.fullmatch(file.parent.name)]
    if not states:
        wanted = f"{folder} must have a {STATE} of TRL's trainers, or checkpoints with one."
        raise DataError(misplaced([folder], trainer="trl") or wanted)
    return max(states, key=lambda file: int(file.parent.name.removeprefix("checkpoint-")))


def _responses(step: int, file: Path) -> StepResponses:
    """Return the completions in a file."""
    splits: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    rows = _parquet_rows(file) if file.suffix == ".parquet" else read_json_lines(file)
    for row in whole_rows(rows, file, needs=("prompt", "completion")):
        rewards = numbers(row, without=NOT_REWARDS)
        reward = sum(rewards.values()) if rewards else math.nan
        texts = {"prompt": _text(row["prompt"]), "response": _text(row["completion"])}
        splits[row.get("mode") == "eval"].append({**texts, "reward": reward, "components": rewards})
    return StepResponses(step, splits[False], splits[True], file.stat().st_mtime)


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise NotReadyError(PARQUET.format(path=file)) from error
    try_arrow_files([file])
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=BATCH_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}.") from error


def _text(value: Any) -> str:
    """Return a text, or the messages of a conversation as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
