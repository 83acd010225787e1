"""Health checks during training: a tracker that writes health.json, reports findings and can pause a run."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_core.files import read_json_object
from rl_metrics.health import (
    GUIDE,
    SEVERITY_RANKS,
    Family,
    Finding,
    GrowingHistory,
    Verdict,
    judge,
    reads,
    with_thresholds,
    without,
)
from rl_metrics.run_files import EventLog, read_events, read_history
from rl_metrics.trackers import ConsoleTracker, Tracker
from rl_trainer_parts.settings.schema import LEVELS, Settings

FILE = "health.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"


class HealthWatch(Tracker):
    """Tracker that checks the run's health every N steps, at its last step and when it ends.

    Samples and histograms do not affect health. Like any tracker, it never stops a run by its own failure: `Fanout`
    warns once and drops it.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        console: ConsoleTracker,
        events: EventLog,
        pause: Callable[[str], None],
    ) -> None:
        """Read the state that earlier launches left.

        Args:
            settings: The run's settings.
            folder: The run's folder.
            console: Shows findings.
            events: Logs findings.
            pause: Pauses the run; its argument is the reason.

        Raises:
            SettingsError: A rule or threshold is unknown.
            OSError: The run's metrics cannot be read.
        """
        self._settings = settings.health
        self._family: Family = "mixed" if settings.distillation.use_task_rewards else "distillation"
        if not settings.distillation.is_on:
            self._family = "policy_gradient"
        self._target = settings.trainer.target
        self._folder = folder
        self._last_step = settings.trainer.steps  # the tracker does not pause there
        self._console = console
        self._events = events
        self._pause_run = pause
        self._rules = without(with_thresholds(GUIDE, settings.health.thresholds), settings.health.off)
        before = read_history(folder / METRICS) if (folder / METRICS).is_file() else None
        is_read = reads(self._rules)
        self._history = GrowingHistory(lambda name: name == self._target.metric or is_read(name), before=before)
        self._is_resumed = len(self._history) > 0
        self._first_step: int | None = None
        self._told = {finding.rule: finding.severity for finding in _findings_before(folder)}
        self._is_judged = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, and check health if due."""
        if self._first_step is None:
            self._first_step = step
        self._history.add(step, metrics)
        self._is_judged = False
        if step and (step % self._settings.every == 0 or step >= self._last_step):
            verdict = self._judge()
            # A resumed run has as many steps to recover.
            has_had_time = not self._is_resumed or step >= self._first_step - 1 + self._settings.every
            if step < self._last_step and has_had_time:
                self._pause(verdict)

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics that arrive after those of later steps."""
        self._history.add_late(step, metrics)
        self._is_judged = False

    def close(self) -> None:
        """Check the finished run; a failed run already reported its error."""
        events = read_events(self._folder / EVENTS) if (self._folder / EVENTS).is_file() else []
        has_failed = any(event["event"] == "run_failed" for event in events[-1:])
        if len(self._history) and has_failed:
            self._write(self._verdict(events))
        elif len(self._history) and not self._is_judged:
            self._judge()

    def _judge(self) -> Verdict:
        newest = self._events.newest
        reasons = [newest[name] for name in {rule.reasons for rule in self._rules} if name in newest]
        verdict = self._verdict(reasons)
        self._write(verdict)
        self._is_judged = True
        self._tell(verdict)
        return verdict

    def _verdict(self, events: Iterable[Mapping[str, Any]]) -> Verdict:
        history = self._history.history()
        is_over = int(history.steps[-1]) >= self._last_step
        return judge(
            history, rules=self._rules, events=events, family=self._family, target=self._target, is_over=is_over
        )

    def _write(self, verdict: Verdict) -> None:
        part = self._folder / f".{FILE}.part"
        part.write_text(json.dumps(verdict.to_json(), indent=1) + "\n")
        part.replace(
            self._folder / FILE
        )  # not synced: the loop must not wait for the disk, and a check writes it again

    def _tell(self, verdict: Verdict) -> None:
        """Report new, worse and resolved findings once each."""
        for finding in verdict.findings:
            before = self._told.get(finding.rule)
            if before is None or SEVERITY_RANKS[before] < SEVERITY_RANKS[finding.severity]:
                self._tell_finding(finding, verdict.step)
            self._told[finding.rule] = finding.severity
        well = {check.rule for check in verdict.checks if check.status == "ok"}
        for rule in [rule for rule in self._told if rule in well]:
            del self._told[rule]
            self._events.write("health_finding_over", step=verdict.step, rule=rule)

    def _tell_finding(self, finding: Finding, step: int) -> None:
        evidence = [one.text for one in finding.evidence]
        self._console.say(
            f"health: {finding.severity}: {finding.what} ({finding.rule}, since step {finding.since_step}; "
            f"{evidence[0]}). Likely: {finding.causes[0]}. Try: {finding.advice[0]}.",
            style="bold red" if finding.severity == "critical" else "yellow",
        )
        self._events.write(
            "health_finding",
            level="warning",
            step=step,
            **{name: getattr(finding, name) for name in ("rule", "severity", "since_step", "what")},
            evidence=evidence,
            causes=list(finding.causes),
            advice=list(finding.advice),
        )

    def _pause(self, verdict: Verdict) -> None:
        pause_on = self._settings.pause_on
        least = min((SEVERITY_RANKS[level] for level in LEVELS if level in pause_on), default=math.inf)
        matching = [
            finding.rule
            for finding in verdict.findings
            if finding.rule in pause_on or SEVERITY_RANKS[finding.severity] >= least
        ]
        if matching:
            self._pause_run(f"health.pause_on: {', '.join(matching)}")


def _findings_before(folder: Path) -> tuple[Finding, ...]:
    """Findings that an earlier launch reported; empty if the file is missing or torn."""
    with suppress(ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        return Verdict.from_json(read_json_object(folder / FILE)).findings
    return ()
