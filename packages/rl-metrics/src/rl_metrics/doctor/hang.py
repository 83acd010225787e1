"""Diagnosis of hangs from hang.json, or from the end of the run's files."""

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl_core.cluster import RoleReport
from rl_core.errors import DataError
from rl_core.files import open_plain
from rl_metrics.doctor.diagnosis import Ailment, Cause, Reading
from rl_metrics.hang.report import HANG_FILE, HangReport
from rl_metrics.hang.stack_places import innermost_frames
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.events import BEGUN, ENDED
from rl_metrics.run_files.json_lines import number_or_none
from rl_metrics.run_files.run_record import RunRecord

MOST_ROLES, MOST_COUNTS, MOST_TEXT = 12, 12, 400
SILENT_S = 600.0
"""A live process counts as silent after this time without output, in seconds."""
SILENT_STEPS = 10.0
"""It must also be silent for this many of its usual steps."""


def judge_hang(run: RunRecord, *, now: float | None = None, is_alive: Callable[[int], bool] | None = None) -> (
    Ailment | Reading
):  # fmt: skip
    """Judge hang.json unless the run continued after it; else judge how the run ended.

    Args:
        run: Record of the run.
        now: Current time, in seconds since the epoch; None reads the clock.
        is_alive: Returns whether the process of a pid is alive; None asks the operating system.
    """
    now = time.time() if now is None else now
    if run.hang and not went_on(run):
        return hang_ailment(run.hang)
    return _judge_end(run, now, is_alive or process_lives)


def hang_ailment(report: HangReport) -> Ailment:
    """Return a hang report as a problem, roles in trouble first."""
    since, verdict = report.no_progress_s, report.verdict or "the report has no verdict on who waits for whom"
    evidence = [Evidence(metric=HANG_FILE, text=verdict, value=since or None)]
    if report.last_progress:
        evidence.append(Evidence(metric=HANG_FILE, text=f"last progress: {report.last_progress}"))
    if report.queue:
        evidence.append(Evidence(metric=HANG_FILE, text=f"queue: {_counts(report.queue)}"))
    causes = report.causes or (verdict,)
    return Ailment(
        kind="hang",
        what=f"The run hangs: no progress for {since:.0f} s." if since else "The run hangs.",
        evidence=tuple(evidence),
        causes=tuple(_hang_cause(text, report.roles) for text in dict.fromkeys(causes)),
        details=tuple(line for role in _ordered(report.roles, causes)[:MOST_ROLES] for line in _role_lines(role)),
    )


def _hang_cause(text: str, roles: Sequence[RoleReport]) -> Cause:
    named = [role for role in roles if role.name and role.name in text]
    name, advice = "hang", "look at the stacks below: the role at the end of the waits is stuck"
    if "deadlock" in text:
        name, advice = "deadlock", "no role can continue: stop the run, resume it, and report the stacks"
    elif "does not answer" in text or " is dead" in text or "restarting" in text:
        name, role = "silent_role", named[0].name if named else "that role"
        advice = f"look at the log of {role}, and end its process; it is restarted"
    elif "collective" in text:
        name, advice = "collective", "ranks run different code: look at what those outside the collective do"
    elif "the queue is full" in text:
        name = "full_queue"
        advice = "find out why no groups are taken out; leases without a worker expire by themselves"
    elif "no group is in flight" in text or "nobody" in text:
        name, advice = "starved", "no rollouts are generated: look at the rollouter and at the remaining prompts"
    elif "reward" in text:
        name, advice = "reward", "look at the service that the reward calls; set reward.timeout_s"
    evidence = tuple(Evidence(metric=HANG_FILE, text=line) for role in named[:3] for line in _waits(role))
    return Cause(name=name, title=text, evidence=evidence, advice=(advice,))


def _ordered(roles: Sequence[RoleReport], causes: Sequence[str]) -> list[RoleReport]:
    """Return roles in the order silent, named by a cause, others."""

    def rank(role: RoleReport) -> int:
        if not role.is_answering or role.state != "serving":
            return 0
        return 1 if any(role.name in cause for cause in causes) else 2

    return sorted(roles, key=rank)


def _role_lines(role: RoleReport) -> list[str]:
    silent = "" if role.is_answering else ", does not answer"
    lines = [f"{role.name}: {role.state}{silent}, for {role.since_s:.0f} s"]
    lines += [f"  {line}" for line in _waits(role)[:3]]
    if role.leases:
        lines.append(f"  holds {len(role.leases)} groups: {', '.join(role.leases[:4])}")
    if role.counts:
        lines.append(f"  {_counts(role.counts)}")
    return [*lines, *(f"  {frame}" for frame in innermost_frames(role.stack))]


def _waits(role: RoleReport) -> list[str]:
    return [f"{role.name} waits for {wait.what} on {wait.on}, for {wait.since_s:.0f} s" for wait in role.waits]


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in list(counts.items())[:MOST_COUNTS])


def went_on(run: RunRecord) -> bool:
    """Return whether a step ended or an attempt began after hang.json was written; a failure is no progress."""
    written = _modified(run.folder / HANG_FILE)
    if run.is_finished or written is None:
        return run.is_finished
    begun = [_number(event.get("time")) for event in run.events if event["event"] in BEGUN]
    steps = [_number(value) for value in run.history.times[-1:].tolist()]
    return max([*begun, *steps], default=0.0) > written + 1.0


def _judge_end(run: RunRecord, now: float, is_alive: Callable[[int], bool]) -> Ailment | Reading:
    if run.is_finished:
        return Reading(kind="stopped", state="right", text="the run ended by itself")
    state = next((event for event in reversed(run.events) if event["event"] in (*ENDED, *BEGUN)), None)
    if state is None:
        return Reading(kind="stopped", state="unknown", text="no event records whether the run ended")
    if state["event"] == "run_stopped":
        return Reading(
            kind="stopped", state="right", text=f"the run was stopped at step {state.get('step', 'unknown')}"
        )
    if state["event"] == "run_failed":
        return _failed(state)
    pid = holder_of(run.folder)
    age = max(now - _last_time(run), 0.0)
    known = _last_words(run, age)
    if pid is not None and is_alive(pid):
        usual = _usual_step_s(run)
        if age < max(SILENT_S, SILENT_STEPS * usual):
            return Reading(kind="stopped", state="right", text=f"the run continues in process {pid}: {known}")
        cause = Cause(
            name="silent_process",
            title=f"process {pid} is alive and writes nothing",
            advice=(
                f"see where it is stuck: py-spy dump --pid {pid}",
                "look at the engine's log, and at the service that the reward calls",
            ),
        )
        evidence = (Evidence(metric="events.jsonl", text=known, value=age),)
        return Ailment(
            kind="hang", what=f"The run has been silent for {age:.0f} s.", evidence=evidence, causes=(cause,)
        )
    where = f"process {pid} is gone" if pid is not None else "no process is known to hold its folder"
    cause = Cause(
        name="killed",
        title=f"it was killed, or its machine went down: {where}",
        advice=("look for the kernel's out-of-memory lines (dmesg), and at the memory below", "resume the run"),
    )
    evidence = (Evidence(metric="events.jsonl", text=known),)
    return Ailment(kind="stopped", what="The run ended without recording an end.", evidence=evidence, causes=(cause,))


def _failed(event: Mapping[str, Any]) -> Ailment:
    error = _text(event.get("error")) or "no reason was recorded"
    name = re.match(r"\w{1,80}", error)
    cause = Cause(
        name=name.group(0) if name else "failed", title=error, advice=("fix the cause in the error, then resume",)
    )
    evidence = (Evidence(metric="events.jsonl", text=f"run_failed at step {event.get('step', 'unknown')}"),)
    return Ailment(kind="stopped", what="The run failed.", evidence=evidence, causes=(cause,))


def _last_words(run: RunRecord, age: float) -> str:
    steps = run.history.steps
    step = f"its last step is {int(steps[-1])}" if len(steps) else "it has no step"
    event = f"its last event {_text(run.events[-1]['event'], 60)}" if run.events else "it has no event"
    return f"{step}, {event}, its last line is {age:.0f} s old"


def _last_time(run: RunRecord) -> float:
    times = [_number(event.get("time")) for event in run.events[-1:]]
    times += [_number(value) for value in run.history.times[-1:].tolist()]
    return max(times, default=0.0)


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


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _text(value: object, length: int = MOST_TEXT) -> str:
    return value[:length] if isinstance(value, str) else ""


def _number(value: object) -> float:
    return number_or_none(value) or 0.0
