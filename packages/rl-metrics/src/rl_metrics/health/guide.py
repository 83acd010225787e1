"""The default health rules, and a run's own thresholds and target in them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from rl_core.errors import SettingsError
from rl_metrics.health.convergence_rules import CONVERGENCE
from rl_metrics.health.efficiency_rules import EFFICIENCY
from rl_metrics.health.finding import TargetVerdict
from rl_metrics.health.mismatch_rules import AGREEMENT
from rl_metrics.health.rules import Rule, with_thresholds, without
from rl_metrics.health.stability_rules import STABILITY
from rl_metrics.health.task_rules import TASK, stuck_validation
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.targets import TargetOptions

GUIDE: tuple[Rule, ...] = (*TASK, *CONVERGENCE, *AGREEMENT, *STABILITY, *EFFICIENCY)
"""Rules by side; findings that do not explain each other are ordered as their rules."""

log = structlog.get_logger(__name__)


def own_rules(settings: Mapping[str, Any]) -> Sequence[Rule]:
    """Return the rules with a run's `health.thresholds` and without its `health.off`; unknown names are ignored.

    Args:
        settings: Settings of the run, as tables; those of another trainer have no effect.
    """
    health = settings.get("health")
    tables = health if isinstance(health, dict) else {}
    thresholds, off = tables.get("thresholds"), tables.get("off")
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
            rules = without(rules, [str(rule)])
        except SettingsError as error:
            log.warning("health_setting_left_out", setting="health.off", error=str(error))
    return rules


def with_target(rules: Sequence[Rule], target: TargetOptions, verdict: TargetVerdict | None) -> tuple[Rule, ...]:
    """Return the rules with validation's plateau judged by the run's target; a reached target cannot be stuck."""
    if target.value is None:
        return tuple(rules)
    if verdict is not None and verdict.is_reached:
        return tuple(rule for rule in rules if rule.name != "plateau")
    sign = -1.0 if target.lower_is_better else 1.0
    aimed = stuck_validation(target.metric or "val-core/*/mean@#", sign=sign, below=target.value)
    return tuple(
        replace(rule, conditions=(aimed, *rule.conditions[1:])) if rule.name == "plateau" else rule for rule in rules
    )
