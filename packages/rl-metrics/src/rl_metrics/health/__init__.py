"""Health rules and verdicts for training runs."""

from rl_metrics.health.finding import (
    SEVERITY_RANKS,
    Check,
    Evidence,
    Finding,
    Severity,
    Side,
    Status,
    TargetVerdict,
    Verdict,
)
from rl_metrics.health.growing import GrowingHistory
from rl_metrics.health.guide import GUIDE
from rl_metrics.health.judging import judge, judge_run
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

__all__ = [
    "GUIDE",
    "SEVERITY_RANKS",
    "Cause",
    "Check",
    "Condition",
    "Evidence",
    "Family",
    "Finding",
    "GrowingHistory",
    "Rule",
    "Severity",
    "Side",
    "Status",
    "TargetVerdict",
    "Threshold",
    "Verdict",
    "judge",
    "judge_run",
    "reads",
    "require_rules",
    "with_thresholds",
    "without",
]
