"""Diagnosis of how a run ended, from its events and its lock."""

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_core.files import open_plain
from rl_metrics.doctor.diagnosis import Cause, Diagnosis, NoFinding
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.events import BEGUN, ENDED
from rl_metrics.run_files.json_lines import number_or_none
from rl_metrics.run_files.run_record import RunRecord

MOST_TEXT = 400
SILENT_S = 600.0
"""A live process counts as silent after this time without output, in seconds."""
SILENT_STEPS = 10.0
"""It must also be silent for this many of its usual steps."""


def diagnose_end(run: RunRecord, *, now: float | None = None, is_alive: Callable[[int], bool] | None = None) -> (
    Diagnosis | NoFinding
):  # fmt: skip
    """Judge how a run ended, or whether its process is silent; see `diagnose_hang`."""
    if run.is_finished:
        return _normal("the run ended by itself")
    last = next((event for event in reversed(run.events) if event["event"] in (*ENDED, *BEGUN)), None)
    if last is None:
        return NoFinding(kind="stopped", state="unknown", text="no event records whether the run ended")
    if last["event"] == "run_stopped":
        return _normal(f"the run was stopped at step {last.get('step', 'unknown')}")
    if last["event"] == "run_failed":
        return _failed(last)
    return _unfinished(run, time.time() if now is None else now, is_alive or process_lives)


def _normal(text: str) -> NoFinding:
    return NoFinding(kind="stopped", state="right", text=text)


def _failed(event: Mapping[str, Any]) -> Diagnosis:
    error = _text(event.get("error")) or "no reason was recorded"
    name = re.match(r"\w{1,80}", error)
    cause = Cause(
        name=name.group(0) if name else "failed", title=error, advice=("fix the cause in the error, then resume",)
    )
    evidence = (Evidence(metric="events.jsonl", text=f"run_failed at step {event.get('step', 'unknown')}"),)
    return Diagnosis(kind="stopped", what="The run failed.", evidence=evidence, causes=(cause,))


def _unfinished(run: RunRecord, now: float, is_alive: Callable[[int], bool]) -> Diagnosis | NoFinding:
    """Judge a run whose end is not recorded."""
    pid = holder_of(run.folder)
    age = max(now - _last_time(run), 0.0)
    known = _last_words(run, age)
    evidence = (Evidence(metric="events.jsonl", text=known, value=age),)
    if pid is None or not is_alive(pid):
        where = f"process {pid} is gone" if pid is not None else "no process is known to hold its folder"
        cause = Cause(
            name="killed",
            title=f"it was killed, or its machine went down: {where}",
            advice=("look for the kernel's out-of-memory lines (dmesg), and at the memory below", "resume the run"),
        )
        what = "The run ended without recording an end."
        return Diagnosis(kind="stopped", what=what, evidence=evidence, causes=(cause,))
    if age < max(SILENT_S, SILENT_STEPS * _usual_step_s(run)):
        return _normal(f"the run continues in process {pid}: {known}")
    cause = Cause(
        name="silent_process",
        title=f"process {pid} is alive and writes nothing",
        advice=(
            f"see where it is stuck: py-spy dump --pid {pid}",
            "look at the engine's log, and at the service that the reward calls",
        ),
    )
    return Diagnosis(kind="hang", what=f"The run has been silent for {age:.0f} s.", evidence=evidence, causes=(cause,))


def _last_words(run: RunRecord, age: float) -> str:
    steps = run.history.steps
    step = f"its last step is {int(steps[-1])}" if len(steps) else "it has no step"
    event = f"its last event {_text(run.events[-1]['event'], 60)}" if run.events else "it has no event"
    return f"{step}, {event}, its last line is {age:.0f} s old"


def _last_time(run: RunRecord) -> float:
    times = [event.get("time") for event in run.events[-1:]] + run.history.times[-1:].tolist()
    return max((number_or_none(value) or 0.0 for value in times), default=0.0)


def _usual_step_s(run: RunRecord) -> float:
    times = [value for value in run.history.times[-50:].tolist() if math.isfinite(value)]
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    return max(gaps[len(gaps) // 2], 0.0) if gaps else 0.0


def holder_of(folder: Path) -> int | None:
    """Return the process that the run's lock names, or None."""
    try:
        with open_plain(folder / ".lock") as (file, _):
            content = file.read(32)
    except (OSError, DataError):
        return None
    text = content.decode(errors="replace").strip()
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,9}", text) else None


def process_lives(pid: int) -> bool:
    """Return whether a process exists on this machine."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _text(value: object, length: int = MOST_TEXT) -> str:
    return value[:length] if isinstance(value, str) else ""
