"""`rl-metrics check`: report a run's health as an exit status."""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from rl_core.errors import DataError, SettingsError
from rl_metrics.commands.parts import AddVerb, opened_run, say, say_json
from rl_metrics.health.finding import SEVERITY_RANKS, SIDE_TITLES, Finding, Status, Verdict
from rl_metrics.health.judging import judge_run
from rl_metrics.health.rules import family_of
from rl_metrics.health.stability import StabilityRow, stability

SICK = 1
UNKNOWN = 2
MARKS: dict[Status, str] = {"ok": "ok", "warning": "WARNING", "critical": "CRITICAL", "unknown": "?"}


def add_to(add_verb: AddVerb) -> None:
    """Add the verb."""
    parser = add_verb(
        "check", "judge a run's health: exit status 0 if healthy, 1 with findings, 2 if it cannot be read"
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument(
        "--fail-on",
        choices=("warning", "critical"),
        default="warning",
        help="minimum severity of a finding for exit status 1 (default: warning)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="RULE.THRESHOLD=VALUE",
        help="override a threshold, such as kl_high.max=0.05; repeatable; `rl-metrics rules` lists them",
    )
    parser.add_argument("--off", action="append", default=[], metavar="RULE", help="skip a rule; repeatable")
    parser.add_argument(
        "--all",
        action="store_true",
        help="also show the rules that cannot be judged for what the run learns and records",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON, with the table of stability")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    thresholds = dict(_setting(text) for text in arguments.set)
    record = opened_run(arguments.path)
    if not len(record.history.steps):
        raise DataError(f"{arguments.path} has no step in its metrics.jsonl to judge; run at least one step first.")
    verdict = judge_run(record, thresholds=thresholds, off=arguments.off)
    rows = stability(record.history, verdict, family=family_of(record.history.values, record.settings))
    if arguments.json:
        say_json({**verdict.to_json(), "stability": [row.to_json() for row in rows]})
    else:
        for line in _verdict_lines(verdict, rows, name=record.name, is_all=arguments.all):
            say(line)
    if verdict.status == "unknown":
        return UNKNOWN
    return SICK if SEVERITY_RANKS[verdict.status] >= SEVERITY_RANKS[arguments.fail_on] else 0


def _setting(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not equals or math.isnan(value):
        raise SettingsError(f"--set must be RULE.THRESHOLD=VALUE, such as kl_high.max=0.05; found {text!r}.")
    return name, value


def _verdict_lines(verdict: Verdict, rows: Sequence[StabilityRow], *, name: str, is_all: bool = False) -> Iterator[str]:
    """Yield the lines of the checklist by side, then those of the table of stability and of the findings."""
    due = [check for check in verdict.checks if check.applies]
    known = sum(check.status != "unknown" for check in due)
    rest = len(verdict.checks) - len(due)
    hidden = f"; {rest} do not apply{'' if is_all else ', see --all'}" if rest else ""
    yield f"{name}: {verdict.status} at step {verdict.step} ({known} of {len(due)} checks had enough data{hidden})"
    if verdict.target is not None:
        yield verdict.target.text
    shown = verdict.checks if is_all else due
    width = max((len(check.rule) for check in shown), default=0)
    for side, title in SIDE_TITLES.items():
        checks = [check for check in shown if check.side == side]
        if checks:
            yield ""
            yield title
        for check in checks:
            yield f"  {MARKS[check.status]:<8}  {check.rule:<{width}}  {check.title}: {check.reading}"
    if rows:
        yield ""
        yield from _stability_lines(rows)
    for finding in verdict.findings:
        yield ""
        yield from _finding_lines(finding)


def _stability_lines(rows: Sequence[StabilityRow]) -> Iterator[str]:
    """Yield the table of stability, in aligned columns."""
    yield "Stability: mean over all steps and newest value, each with its healthy range"
    cells: list[tuple[str, ...]] = [("", "metric", "mean", "healthy", "newest", "healthy", "source of the range")]
    for row in rows:
        mark = "?" if row.mark == "unknown" else row.mark
        values = (f"{row.mean:.4g}", row.healthy_mean, f"{row.last:.4g}", row.healthy_last, row.source)
        cells.append((mark, row.metric, *(value or "-" for value in values)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    for (shown, *_), row in zip(cells[1:], rows, strict=True):
        if row.why:
            yield f"  {shown} {row.metric}: {row.why}"


def _finding_lines(finding: Finding) -> Iterator[str]:
    """Yield the lines of a finding: problem, evidence, causes and advice."""
    yield f"{finding.severity.upper()} {finding.rule}, since step {finding.since_step}: {finding.what}"
    for evidence in finding.evidence:
        yield f"  evidence: {evidence.text}"
    for number, (cause, advice) in enumerate(zip_longest(finding.causes, finding.advice), start=1):
        if cause is not None:
            yield f"  cause {number}:  {cause}"
        if advice is not None:
            yield f"     try:    {advice}"
