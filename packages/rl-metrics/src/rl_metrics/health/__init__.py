"""Health rules and verdicts for training runs."""

from rl_metrics.health.finding import SEVERITY_RANKS, Finding, Severity, Verdict
from rl_metrics.health.judging import GUIDE, judge, judge_run
from rl_metrics.health.rules import (
    Cause,
    Condition,
    Family,
    Rule,
    Threshold,
    reads,
    require_rules,
    with_thresholds,
    without,
)
from rl_metrics.run_files.history import GrowingHistory

__all__ = [
    "GUIDE",
    "SEVERITY_RANKS",
    "Cause",
    "Condition",
    "Family",
    "Finding",
    "GrowingHistory",
    "Rule",
    "Severity",
    "Threshold",
    "Verdict",
    "judge",
    "judge_run",
    "reads",
    "require_rules",
    "with_thresholds",
    "without",
]
