"""Diagnosis of hangs from hang.json; without it, of how the run ended."""

from collections.abc import Callable, Mapping

from rl_core.cluster import RoleReport
from rl_metrics.doctor.diagnosis import Cause, Diagnosis, NoFinding
from rl_metrics.doctor.run_end import diagnose_end
from rl_metrics.hang import HANG_FILE, HangReport, innermost_frames
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.events import BEGUN
from rl_metrics.run_files.json_lines import number_or_none
from rl_metrics.run_files.run_record import RunRecord

MOST_ROLES, MOST_COUNTS = 12, 12


def diagnose_hang(run: RunRecord, *, now: float | None = None, is_alive: Callable[[int], bool] | None = None) -> (
    Diagnosis | NoFinding
):  # fmt: skip
    """Judge hang.json unless the run continued after it; else judge how the run ended.

    Args:
        run: Record of the run.
        now: Current time, in seconds since the epoch; None reads the clock.
        is_alive: Returns whether the process of a pid is alive; None asks the operating system.
    """
    if run.hang and not went_on(run):
        return describe_report(run.hang)
    return diagnose_end(run, now=now, is_alive=is_alive)


def describe_report(report: HangReport) -> Diagnosis:
    """Return a hang report as a problem, roles that do not answer first."""
    evidence = [Evidence(metric=HANG_FILE, text=report.summary, value=report.no_progress_s or None)]
    if report.queue:
        evidence.append(Evidence(metric=HANG_FILE, text=f"queue: {_counts(report.queue)}"))
    causes = [
        Cause(name="silent_role", title=text, advice=("look at its stack below and at its log; restart the run",))
        for text in report.causes
    ] or [
        Cause(
            name="hang",
            title="all roles answer, and none makes progress",
            advice=(
                "look below at what each role does and at its stack",
                "set reward.timeout_s if a reward or a tool does not return",
            ),
        )
    ]
    ordered = sorted(report.roles, key=lambda role: role.is_answering and role.state == "serving")
    since = report.no_progress_s
    return Diagnosis(
        kind="hang",
        what=f"The run hangs: no progress for {since:.0f} s." if since else "The run hangs.",
        evidence=tuple(evidence),
        causes=tuple(causes),
        details=tuple(line for role in ordered[:MOST_ROLES] for line in _role_lines(role)),
    )


def _role_lines(role: RoleReport) -> list[str]:
    silent = "" if role.is_answering else f", does not answer, for {role.since_s:.0f} s"
    lines = [f"{role.name}: {role.state}{silent}"]
    lines += [f"  {line}" for line in (role.doing, _counts(role.counts)) if line]
    return [*lines, *(f"  {frame}" for frame in innermost_frames(role.stack))]


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in list(counts.items())[:MOST_COUNTS])


def went_on(run: RunRecord) -> bool:
    """Return whether a step ended or an attempt began after hang.json was written; a failure is no progress."""
    if run.is_finished:
        return True
    try:
        written = (run.folder / HANG_FILE).stat().st_mtime
    except OSError:
        return False
    times = [event.get("time") for event in run.events if event["event"] in BEGUN]
    times += run.history.times[-1:].tolist()
    return max((number_or_none(value) or 0.0 for value in times), default=0.0) > written + 1.0
