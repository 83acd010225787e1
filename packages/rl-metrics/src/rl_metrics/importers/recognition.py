"""Whose files somebody gave to the wrong importer."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from rl_metrics.importers.verl_console import step_of_line
from rl_metrics.run_files.json_lines import parse_line, read_lines
from rl_metrics.run_files.run_record import has_begun

NUM_LINES = 10_000
"""Of a file, so many are looked at."""

STATES = "trainer_state.json", "checkpoint-*/trainer_state.json"


def advice_for(paths: Sequence[Path], *, trainer: str) -> str:
    """A sentence with the command for the first path that is another trainer's; empty where none is.

    Args:
        paths: Files or folders in which nothing of the trainer was found.
        trainer: The one they were said to be of.
    """
    for path in paths:
        kind = _kind_of(path)
        if kind == "run":
            return f" {path} is of a run that needs no import; use: rl-metrics check {path}"
        if kind not in (None, trainer):
            what = {"verl": "a log of verl", "trl": "a state of TRL's trainers"}[kind]
            return f" {path} looks like {what}; use: rl-metrics import {kind} {path} --into RUN"
    return ""


def _kind_of(path: Path) -> str | None:
    if path.is_dir():
        if any(next(path.glob(state), None) for state in STATES):
            return "trl"
        return "run" if has_begun(path) else None
    for line, _ in itertools.islice(read_lines(path), NUM_LINES):
        if b'"log_history"' in line:
            return "trl"
        row = parse_line(line) if line.lstrip().startswith(b"{") else None
        if row is not None and "step" in row:
            return "verl" if isinstance(row.get("data"), dict) else "run"
        if b"step:" in line and step_of_line(line.decode(errors="replace")):
            return "verl"
    return None
