"""Verdicts on runs: findings of the default health rules, their likely causes, and which findings explain others."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import structlog

from rl_core.errors import SettingsError
from rl_metrics.health.convergence_rules import CONVERGENCE
from rl_metrics.health.efficiency_rules import EFFICIENCY
from rl_metrics.health.evaluate_rules import ConditionResult, RuleEvaluator
from rl_metrics.health.finding import SEVERITY_RANKS, Check, Evidence, Finding, Status, TargetVerdict, Verdict
from rl_metrics.health.mismatch_rules import AGREEMENT
from rl_metrics.health.rules import FAMILY_TEXTS, Cause, Condition, Family, Rule, family_of, with_thresholds, without
from rl_metrics.health.stability_rules import STABILITY
from rl_metrics.health.task_rules import TASK, stuck_validation
from rl_metrics.run_files.events import BEGUN, ENDED
from rl_metrics.run_files.history import History
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.run_files.run_record import RunRecord
from rl_metrics.targets import TargetOptions, Validated, best_of, target_of, validations_of

GUIDE: tuple[Rule, ...] = (*TASK, *CONVERGENCE, *AGREEMENT, *STABILITY, *EFFICIENCY)
"""Rules by side; findings that do not explain each other are ordered as their rules."""

MAX_ERROR_CHARS = 300
NEAR = 10
"""Number of steps that an effect may precede its cause, because windows differ; larger for rules with longer windows.
"""

log = structlog.get_logger(__name__)


def judge(
    history: History,
    *,
    rules: Sequence[Rule] = GUIDE,
    thresholds: Mapping[str, float] | None = None,
    events: Iterable[Mapping[str, Any]] = (),
    family: Family | None = None,
    is_over: bool = False,
    target: TargetOptions | None = None,
) -> Verdict:
    """Judge a run's health at its newest step.

    Args:
        history: Metrics of the run so far.
        rules: Health rules.
        thresholds: Overrides by rule and threshold, such as `{"kl_high.max": 0.05}`.
        events: Events of the run, in order.
        family: Family of the run; None infers it from the names of the metrics.
        is_over: Whether the newest step is the last; some thresholds are for the end of a run only.
        target: What validation should reach; None has no target.

    Raises:
        SettingsError: A threshold does not exist.
    """
    target, family = target or TargetOptions(), family or family_of(history.values, {})
    newest = int(history.steps[-1]) if len(history.steps) else 0
    with np.errstate(all="ignore"):  # values may be near the largest float
        aim = judge_target(history, target)
        evaluator = RuleEvaluator(history, is_over=is_over)
        by_name = {rule.name: rule for rule in with_target(with_thresholds(rules, thresholds or {}), target, aim)}
        reports = _of_this_attempt(events)
        judged = [_check(rule, evaluator, reports, family, newest) for rule in by_name.values()]
        checks = tuple(check for check, _ in judged)
        findings = {finding.rule: finding for _, finding in judged if finding is not None}
        explainers = _explainers(by_name, findings)
        explained = {name: _explain(by_name[name], findings[name], explainers, evaluator) for name in findings}
    known = [check.status for check in checks if check.status != "unknown"]
    return Verdict(
        status=max(known, key=SEVERITY_RANKS.__getitem__, default="unknown"),
        step=newest,
        checks=checks,
        findings=_in_order(explained, explainers),
        target=aim,
    )


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
    verdict = judge(
        run.history,
        rules=without(with_thresholds(own_rules(run.settings), thresholds or {}), off),
        events=run.events,
        family=family_of(run.history.values, run.settings),
        target=target_of(run.settings),
        is_over=run.is_finished or not any(event["event"] in (*BEGUN, *ENDED) for event in run.events),
    )
    if not run.is_imported:
        return verdict
    findings = (replace(finding, advice=tuple(map(without_measuring, finding.advice))) for finding in verdict.findings)
    return replace(verdict, findings=tuple(findings))


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


def without_measuring(text: str) -> str:
    """Remove advice to measure more, because an imported run's trainer does not have these settings."""
    return re.sub(r"(, and |; )?set metrics\.[^;]*", "", text)


def judge_target(history: History, target: TargetOptions) -> TargetVerdict | None:
    """Return the verdict on the run's target; None without a value to reach."""
    if target.value is None:
        return None
    validations = validations_of(history, target)
    best = best_of(validations, target)
    reached = next((validation for validation in validations if target.is_reached(validation.value)), None)
    if best is None:
        text = "not judged, because no validation reports it yet"
    elif reached is None:
        newest = validations[-1]
        text = f"not reached; {_described(best)}, newest {newest.value:.4g} at step {newest.step}"
    else:
        text = f"reached at step {reached.step} ({reached.value:.4g}); {_described(best)}"
    return TargetVerdict(
        metric=target.label,
        value=target.value,
        lower_is_better=target.lower_is_better,
        is_reached=reached is not None,
        reached_at_step=None if reached is None else reached.step,
        best=None if best is None else best.value,
        best_step=None if best is None else best.step,
        text=f"target {target.label} {'<=' if target.lower_is_better else '>='} {target.value:.4g}: {text}",
    )


def _described(best: Validated) -> str:
    return f"best {best.value:.4g} at step {best.step}"


def _check(
    rule: Rule, evaluator: RuleEvaluator, reports: Sequence[Mapping[str, Any]], family: Family, newest: int
) -> tuple[Check, Finding | None]:
    """Return a rule's check and its finding, before other findings are known."""
    if family not in rule.families:
        return _line(rule, "unknown", f"does not apply to {FAMILY_TEXTS[family]}", applies=False), None
    for condition in rule.idle:
        for result in evaluator.wrong(condition, rule):
            return _line(rule, "unknown", result.evidence.text, applies=False), None
    results = [result for condition in rule.conditions for result in evaluator.results(condition, rule)]
    enough = [result for result in results if len(result.steps) >= result.num_needed and not result.is_old]
    excuses = [
        (result, evaluator.excuse(result.condition, rule))
        for result in enough
        if result.is_wrong and all(evaluator.wrong(need, rule) for need in result.condition.needs)
    ]
    wrong = sorted((result for result, excuse in excuses if excuse is None), key=lambda result: result.since_step)
    reported = [_reported(report, newest) for report in reports if _is_finding(rule, report)]
    if not wrong and not reported:
        excuse = (excuses[0][1] or "") if excuses else ""
        reading = _reading(rule, results, enough, evaluator)
        if excuse:
            reading = f"{excuses[0][0].evidence.text}, which is accepted: {excuse}"
        status: Status = "ok" if enough else "unknown"
        is_recorded = any(evaluator.has(condition.reads[0]) for condition in _due(rule, evaluator))
        return replace(_line(rule, status, reading, applies=is_recorded), excuse=excuse), None
    # of results that report the same about a metric over several windows, the first
    wrong = list({(result.metric, result.condition.says): result for result in reversed(wrong)}.values())[::-1]
    reasons = [_reported(report, newest)[0] for report in reports if wrong and report.get("event") == rule.reasons]
    evidence = (*(text for text, _ in reported), *(result.evidence for result in wrong), *reasons[-1:])
    finding = Finding(
        rule=rule.name,
        side=rule.side,
        severity=rule.severity,
        what=rule.what,
        since_step=min([*(step for _, step in reported), *(result.since_step for result in wrong)]),
        evidence=evidence,
        causes=(),
        advice=(),
    )
    return _line(rule, rule.severity, "; ".join(one.text for one in evidence)), finding


def _line(rule: Rule, status: Status, reading: str, *, applies: bool = True) -> Check:
    return Check(rule=rule.name, side=rule.side, title=rule.title, status=status, reading=reading, applies=applies)


def _due(rule: Rule, evaluator: RuleEvaluator) -> list[Condition]:
    """Return the rule's conditions without those that wait for the end of the run."""
    return [condition for condition in rule.conditions if evaluator.is_over or not condition.at_end]


def _reading(
    rule: Rule, results: Sequence[ConditionResult], enough: Sequence[ConditionResult], evaluator: RuleEvaluator
) -> str:
    """Return what was measured, or why nothing could be judged."""
    old = [result.reading for result in results if result.is_old]
    if enough or old:
        return "; ".join(dict.fromkeys(result.reading for result in enough[:3])) or old[0]
    if results:
        first = min(results, key=lambda result: result.num_needed - len(result.steps))
        return f"{len(first.steps)} of the {first.num_needed} steps needed"
    if not _due(rule, evaluator):
        return "judged at the end of the run"
    columns = list(dict.fromkeys(names for condition in rule.conditions for names in condition.needed))
    missing = [names for names in columns if not evaluator.has(names)]
    known = "the run does not record" if missing else "no step has finite values of"
    return f"{known} {', '.join(' or '.join(names) for names in missing or columns)}"


def _of_this_attempt(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    known = list(events)
    return known[max((n for n, event in enumerate(known, 1) if event.get("event") in BEGUN), default=0) :]


def _is_finding(rule: Rule, event: Mapping[str, Any]) -> bool:
    return any(event.get("event") == name and text in str(event.get("error")) for name, text in rule.events)


def _reported(event: Mapping[str, Any], newest: int) -> tuple[Evidence, int]:
    """Return an event as evidence, and its step."""
    step = event.get("step")
    since = step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else newest
    return Evidence(metric=str(event.get("event")), text=str(event.get("error"))[:MAX_ERROR_CHARS]), since


def _explainers(rules: Mapping[str, Rule], findings: Mapping[str, Finding]) -> dict[str, frozenset[str]]:
    """Return, for each finding, the rules whose findings explain it."""
    named = {name: findings.keys() & {cause.rule for cause in rules[name].causes} for name in findings}

    def is_before(cause: str, effect: str) -> bool:
        slack = max(rules[effect].window, rules[effect].min_steps, NEAR)
        if effect in named[cause]:  # each may explain the other: the earlier one does
            slack = -1
        return findings[cause].since_step <= findings[effect].since_step + slack

    return {effect: frozenset(cause for cause in named[effect] if is_before(cause, effect)) for effect in findings}


def _explain(
    rule: Rule, finding: Finding, explainers: Mapping[str, frozenset[str]], evaluator: RuleEvaluator
) -> Finding:
    """Return the finding with its causes."""
    because = explainers[rule.name]
    likely, possible, evidence = list[Cause](), list[Cause](), list(finding.evidence)
    for cause in rule.causes:
        signs = evaluator.wrong(cause.sign, rule) if cause.sign else []
        evidence += [sign.evidence for sign in signs]
        if signs or cause.rule in because:
            likely.append(cause)
        elif cause.rule is None and cause.sign is None:
            possible.append(cause)
    likely.sort(key=lambda cause: cause.rule is not None and bool(explainers[cause.rule] & because))  # roots first
    advice: dict[str, str] = {}
    for cause in (*likely, *possible):
        advice.setdefault(cause.text, cause.advice)
    return replace(
        finding,
        evidence=tuple(dict.fromkeys(evidence)),
        causes=tuple(advice),
        advice=tuple(advice.values()),
        because=tuple(sorted(because)),
    )


def _in_order(findings: Mapping[str, Finding], explainers: Mapping[str, frozenset[str]]) -> tuple[Finding, ...]:
    """Order findings so that each comes after those that explain it.

    Among findings that no remaining one explains, the first is the one with the worst severity, including all that it
    explains; then the one that explains most; then the one that began first.

    Args:
        findings: Findings by rule, in the order of the rules.
        explainers: For each rule, the rules whose findings explain its finding.
    """
    effects = {rule: _effects(rule, explainers) for rule in findings}

    def urgency(rule: str) -> tuple[int, int, int]:
        worst = max(SEVERITY_RANKS[findings[name].severity] for name in {rule, *effects[rule]})
        return -worst, -len(effects[rule]), findings[rule].since_step

    left, ordered = list(findings), list[Finding]()
    while left:
        roots = [rule for rule in left if not (explainers[rule] - {rule}).intersection(left)]
        first = min(roots or left, key=urgency)
        left.remove(first)
        ordered.append(findings[first])
    return tuple(ordered)


def _effects(rule: str, explainers: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return all findings that a finding explains, directly or through others."""
    known, fresh = {rule}, {rule}
    while fresh:
        fresh = {effect for effect, because in explainers.items() if because & fresh} - known
        known |= fresh
    return frozenset(known - {rule})
