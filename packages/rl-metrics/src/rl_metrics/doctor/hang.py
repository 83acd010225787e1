"""Diagnosis of hangs from hang.json; without it, of how the run ended, from its events and its lock."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from rl_core.cluster import RoleReport
from rl_core.cluster.processes.guard import is_running
from rl_metrics.doctor.diagnosis import Cause, Diagnosis, NoFinding
from rl_metrics.hang import HANG_FILE, HangReport
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.events import BEGUN, ENDED
from rl_metrics.run_files.json_lines import number_or_none
from rl_metrics.run_files.run_record import RunRecord

MOST_ROLES, MOST_COUNTS, MOST_FRAMES, MOST_TEXT = 12, 12, 6, 400
SILENT_S = 600.0
"""A live process counts as silent after this time without output, in seconds."""
SILENT_STEPS = 10.0
"""It must also be silent for this many of its usual steps."""

_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+),? in (\S+)')
_HEADER = re.compile(r"^(thread |task |Thread 0x|Current thread 0x)")
_SERVED = "rl_core/cluster/served.py"


def diagnose_hang(run: RunRecord) -> Diagnosis | NoFinding:
    """Judge hang.json unless the run continued after it; else judge how the run ended, or whether it is silent."""
    if run.hang and not has_continued(run):
        return describe_report(run.hang)
    if run.is_finished:
        return _normal("the run ended by itself")
    last = next((event for event in reversed(run.events) if event["event"] in (*ENDED, *BEGUN)), None)
    if last is None:
        return NoFinding(kind="stopped", state="unknown", text="no event records whether the run ended")
    if last["event"] == "run_stopped":
        return _normal(f"the run was stopped at step {last.get('step', 'unknown')}")
    return _failed(last) if last["event"] == "run_failed" else _unfinished(run)


def describe_report(report: HangReport) -> Diagnosis:
    """Return a hang report as a problem, roles that do not answer first."""
    since = report.no_progress_s
    evidence = [Evidence(metric=HANG_FILE, text=report.summary, value=since or None)]
    if report.queue:
        evidence.append(Evidence(metric=HANG_FILE, text=f"queue: {_counts(report.queue)}"))
    silent_advice = ("look at its stack below and at its log; restart the run",)
    causes = [Cause(name="silent_role", title=text, advice=silent_advice) for text in report.causes]
    advice = (
        "look below at what each role does and at its stack",
        "set reward.timeout_s if a reward or a tool does not return",
    )
    ordered = sorted(report.roles, key=lambda role: role.is_answering and role.state == "serving")
    return Diagnosis(
        kind="hang",
        what=f"The run hangs: no progress for {since:.0f} s." if since else "The run hangs.",
        evidence=tuple(evidence),
        causes=tuple(causes) or (Cause(name="hang", title="all roles answer, and none makes progress", advice=advice),),
        details=tuple(line for role in ordered[:MOST_ROLES] for line in _role_lines(role)),
    )


def _role_lines(role: RoleReport) -> list[str]:
    silent = "" if role.is_answering else f", does not answer, for {role.since_s:.0f} s"
    lines = [role.doing, _counts(role.counts), *innermost_frames(role.stack)]
    return [f"{role.name}: {role.state}{silent}", *(f"  {line}" for line in lines if line)]


def innermost_frames(stack: str) -> list[str]:
    """Return frames such as "recv (socket.py:12)", innermost first.

    They are those of the thread or task that runs a method of the role, from that method on, or else of the first
    thread.
    """
    blocks = _blocks(stack)
    chosen = next(filter(None, blocks), [])
    for frames in blocks:
        served = [index for index, (file, *_) in enumerate(frames) if file.endswith(_SERVED)]
        if served and frames[served[-1] + 1 :]:
            chosen = frames[served[-1] + 1 :]
            break
    return [f"{function} ({PurePath(file).name}:{line})" for file, line, function in chosen[::-1][:MOST_FRAMES]]


def _blocks(stack: str) -> list[list[tuple[str, ...]]]:
    """Return file, line and function of the frames of each thread, then of each task, outermost first."""
    current: list[tuple[str, ...]] = []
    threads, tasks = [current], list[list[tuple[str, ...]]]()
    for line in stack.splitlines():
        if _HEADER.match(line):
            current = []
            (tasks if line.startswith("task ") else threads).append(current)
        elif matched := _FRAME.match(line):
            current.append(matched.groups())
    if "recent call first" in stack:
        threads = [frames[::-1] for frames in threads]
    return [*threads, *tasks]


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in list(counts.items())[:MOST_COUNTS])


def has_continued(run: RunRecord) -> bool:
    """Return whether a step ended or an attempt began after hang.json was written; a failure is no progress."""
    try:
        written = (run.folder / HANG_FILE).stat().st_mtime
    except OSError:
        return run.is_finished
    begun = [event for event in run.events if event["event"] in BEGUN]
    return run.is_finished or _newest_time(run, begun) > written + 1.0


def _newest_time(run: RunRecord, events: Sequence[Mapping[str, Any]]) -> float:
    """Return the time of the newest of these events and of the run's steps; 0 without one."""
    times = [event.get("time") for event in events] + run.history.times[-1:].tolist()
    return max((number_or_none(value) or 0.0 for value in times), default=0.0)


def _normal(text: str) -> NoFinding:
    return NoFinding(kind="stopped", state="right", text=text)


def _failed(event: Mapping[str, Any]) -> Diagnosis:
    error = _text(event.get("error")) or "no reason was recorded"
    name = re.match(r"\w{1,80}", error)
    cause = Cause(name=name[0] if name else "failed", title=error, advice=("fix the cause in the error, then resume",))
    evidence = (Evidence(metric="events.jsonl", text=f"run_failed at step {event.get('step', 'unknown')}"),)
    return Diagnosis(kind="stopped", what="The run failed.", evidence=evidence, causes=(cause,))


def _unfinished(run: RunRecord) -> Diagnosis | NoFinding:
    """Judge a run whose end is not recorded."""
    pid = holder_of(run.folder)
    age = max(time.time() - _newest_time(run, run.events[-1:]), 0.0)
    step = f"its last step is {int(run.history.steps[-1])}" if len(run.history.steps) else "it has no step"
    event = f"its last event {_text(run.events[-1]['event'])[:60]}" if run.events else "it has no event"
    newest = f"{step}, {event}, its last line is {age:.0f} s old"
    evidence = (Evidence(metric="events.jsonl", text=newest, value=age),)
    if pid is None or not is_running(pid):
        where = f"process {pid} is gone" if pid is not None else "no process is known to hold its folder"
        cause = Cause(
            name="killed",
            title=f"it was killed, or its machine went down: {where}",
            advice=("look for the kernel's out-of-memory lines (dmesg), and at the memory below", "resume the run"),
        )
        what = "The run ended without recording an end."
        return Diagnosis(kind="stopped", what=what, evidence=evidence, causes=(cause,))
    times = run.history.times[-50:]
    gaps = np.diff(times[np.isfinite(times)])
    usual_step_s = float(np.median(gaps)) if len(gaps) else 0.0
    if age < max(SILENT_S, SILENT_STEPS * usual_step_s):
        return _normal(f"the run continues in process {pid}: {newest}")
    cause = Cause(
        name="silent_process",
        title=f"process {pid} is alive and writes nothing",
        advice=(
            f"see where it is stuck: py-spy dump --pid {pid}",
            "look at the engine's log, and at the service that the reward calls",
        ),
    )
    return Diagnosis(kind="hang", what=f"The run has been silent for {age:.0f} s.", evidence=evidence, causes=(cause,))


def holder_of(folder: Path) -> int | None:
    """Return the process that the run's lock names, or None."""
    try:
        return int((folder / ".lock").read_bytes())
    except (OSError, ValueError):  # missing, or not written yet
        return None


def _text(value: object) -> str:
    return value[:MOST_TEXT] if isinstance(value, str) else ""
