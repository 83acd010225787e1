"""The verdict on a recorded run, by the rules in its settings."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from rl_core.errors import SettingsError
from rl_metrics.health.families import family_of
from rl_metrics.health.finding import Verdict
from rl_metrics.health.guide import GUIDE
from rl_metrics.health.judging import judge
from rl_metrics.health.rules import Rule, require_rules, with_thresholds, without
from rl_metrics.run_files.events import BEGUN, ENDED
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.run_files.run_record import RunRecord
from rl_metrics.targets import target_of

log = structlog.get_logger(__name__)


def judge_run(run: RunRecord, *, thresholds: Mapping[str, float] | None = None, off: Collection[str] = ()) -> Verdict:
    """Judge a recorded run's health at its newest step, which is its last unless its events say otherwise.

    Args:
        run: Record of the run; `[health]` of its settings applies.
        thresholds: Overrides by rule and threshold, with priority over the run's.
        off: Rules to skip, in addition to those that the run skips.

    Raises:
        SettingsError: A rule or threshold does not exist.
        OSError: A file cannot be read.
    """
    rules = without(with_thresholds(own_rules(run.settings), thresholds or {}), off)
    verdict = judge(
        run.history,
        rules=rules,
        events=run.events,
        family=family_of(run.history.values, run.settings),
        target=target_of(run.settings),
        is_over=run.is_finished or not any(event["event"] in (*BEGUN, *ENDED) for event in run.events),
    )
    if not run.is_imported:
        return verdict
    findings = (replace(finding, advice=tuple(map(without_measuring, finding.advice))) for finding in verdict.findings)
    return replace(verdict, findings=tuple(findings))


def without_measuring(text: str) -> str:
    """Remove advice to measure more, because an imported run's trainer does not have these settings."""
    return re.sub(r"(, and |; )?set metrics\.[^;]*", "", text)


def own_rules(settings: Mapping[str, Any]) -> Sequence[Rule]:
    """Return the rules with a run's `health.thresholds` and without its `health.off`; unknown names are ignored.

    Args:
        settings: Settings of the run, as tables; those of another trainer have no effect.
    """
    health = settings.get("health")
    if not isinstance(health, dict):
        return GUIDE
    thresholds, off = health.get("thresholds"), health.get("off")
    rules: Sequence[Rule] = GUIDE
    for name, value in thresholds.items() if isinstance(thresholds, dict) else ():
        number = number_or_nan(value)
        try:
            if math.isnan(number):
                raise SettingsError(f"{name} must be a number; found {str(value)[:80]!r}.")
            rules = with_thresholds(rules, {name: number})
        except SettingsError as error:
            log.warning("health_setting_left_out", setting="health.thresholds", error=str(error))
    for rule in off if isinstance(off, list) else ():
        try:
            require_rules(GUIDE, [str(rule)])
        except SettingsError as error:
            log.warning("health_setting_left_out", setting="health.off", error=str(error))
    return tuple(rule for rule in rules if not isinstance(off, list) or rule.name not in off)
