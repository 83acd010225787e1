"""Recognition of files given to the wrong importer."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import DataError
from rl_metrics.importers.verl_console import step_of_line
from rl_metrics.run_files.json_lines import parse_line, read_lines
from rl_metrics.run_files.run_record import has_begun

NUM_LINES = 10_000
"""Maximum number of lines of a file to inspect."""

STATES = "trainer_state.json", "checkpoint-*/trainer_state.json"


TRAINERS = {"verl": "a log of verl", "trl": "a state of TRL's trainers"}


def misplaced(paths: Sequence[Path], *, trainer: str | None = None) -> str:
    """Return what to do with the first path of an unexpected kind; empty without one.

    Args:
        paths: Files or folders.
        trainer: Trainer of the importer; None if a run of this project is expected.
    """
    for path in paths:
        kind = _kind_of(path)
        if kind == "run" and trainer is not None:
            return f"{path} belongs to a run of this project, which needs no import. Use: rl-metrics check {path}"
        if kind in TRAINERS and kind != trainer:
            wanted = "a run of this project" if trainer is None else TRAINERS[trainer]
            command = f"rl-metrics import {kind} {path} --into RUN"
            return f"{path} is {TRAINERS[kind]}, not {wanted}. Import it with: {command}"
    return ""


def require_there(path: Path, *, wanted: str) -> None:
    """Refuse a missing path.

    Raises:
        DataError: The path does not exist; the message has what was expected.
    """
    if not path.exists():
        raise DataError(f"{path} must be {wanted}; there is no such file or folder (looked in {Path.cwd()}).")


def _kind_of(path: Path) -> str | None:
    if path.is_dir():
        if any(next(path.glob(state), None) for state in STATES):
            return "trl"
        return "run" if has_begun(path) else None
    if not path.is_file():
        return None
    for line, _ in itertools.islice(read_lines(path), NUM_LINES):
        if b'"log_history"' in line:
            return "trl"
        row = parse_line(line) if line.lstrip().startswith(b"{") else None
        if row is not None and "step" in row:
            return "verl" if isinstance(row.get("data"), dict) else "run"
        if b"step:" in line and step_of_line(line.decode(errors="replace")):
            return "verl"
    return None
