"""Evaluation of health rules: findings, likely causes, and explanations between findings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rl_metrics.health.evaluate_rules import ConditionResult, RuleEvaluator
from rl_metrics.health.families import FAMILY_TEXTS, Family, family_of
from rl_metrics.health.finding import SEVERITY_RANKS, Check, Evidence, Finding, Status, Verdict
from rl_metrics.health.guide import GUIDE
from rl_metrics.health.plateau_rule import with_target
from rl_metrics.health.rules import Cause, Condition, Rule, with_thresholds
from rl_metrics.health.target_verdict import judge_target
from rl_metrics.run_files.events import BEGUN
from rl_metrics.run_files.history import History
from rl_metrics.targets import TargetOptions

WORST_FIRST: tuple[Status, ...] = ("critical", "warning", "ok")
MAX_ERROR_CHARS = 300
NEAR = 10
"""Number of steps that an effect may precede its cause, because windows differ; larger for rules with longer windows.
"""


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
    if thresholds:
        rules = with_thresholds(rules, thresholds)
    target = target or TargetOptions()
    with np.errstate(all="ignore"):  # values may be near the largest float
        aim = judge_target(history, target)
        evaluator = RuleEvaluator(history, is_over=is_over)
        newest = int(history.steps[-1]) if len(history.steps) else 0
        reports, family = _of_this_attempt(events), family or family_of(history.values, {})
        verdict = _judged(evaluator, with_target(rules, target, aim), reports, family, newest)
    return replace(verdict, target=aim)


def _judged(
    evaluator: RuleEvaluator, rules: Sequence[Rule], reports: Sequence[Mapping[str, Any]], family: Family, newest: int
) -> Verdict:
    judged = [
        _check(rule, evaluator, reports, newest)
        if family in rule.families
        else (_line(rule, "unknown", f"does not apply to {FAMILY_TEXTS[family]}", applies=False), None)
        for rule in rules
    ]
    checks, found = tuple(check for check, _ in judged), {one.rule: one for _, one in judged if one is not None}
    by_name = {rule.name: rule for rule in rules}
    explainers = _explainers(by_name, found)
    explained = {name: _explain(by_name[name], one, explainers, evaluator) for name, one in found.items()}
    return Verdict(status=_worst(checks), step=newest, checks=checks, findings=_in_order(explained, explainers))


def _check(
    rule: Rule, evaluator: RuleEvaluator, reports: Sequence[Mapping[str, Any]], newest: int
) -> tuple[Check, Finding | None]:
    """Return a rule's check and its finding, before other findings are known."""
    for condition in rule.idle:
        for result in evaluator.found(condition, rule):
            return _line(rule, "unknown", result.evidence.text, applies=False), None
    results = [result for condition in rule.conditions for result in evaluator.results(condition, rule)]
    enough = [result for result in results if len(result.steps) >= _needed(rule, result) and not result.is_old]
    reported = [_told(report, newest) for report in reports if _is_reported(rule, report)]
    wrong = [
        result
        for result in enough
        if result.is_wrong and all(evaluator.found(need, rule) for need in result.condition.needs)
    ]
    excuses = [(result, evaluator.excuse(result.condition, rule)) for result in wrong]
    wrong = [result for result, excuse in excuses if excuse is None]
    is_wrong = bool(wrong)
    if not is_wrong and not reported:
        reading = _reading(rule, results, enough, evaluator)
        if excuses:
            reading = f"{_with_sureness(rule, excuses[0][0]).text}, which is accepted: {excuses[0][1]}"
        missing = not any(evaluator.has(condition.reads[0]) for condition in _due(rule, evaluator))
        line = _line(rule, "ok" if enough else "unknown", reading, applies=not missing)
        return replace(line, excuse=(excuses[0][1] or "") if excuses else ""), None
    wrong = _without_repeats(sorted(wrong, key=lambda result: result.since_step)) if is_wrong else []
    reasons = [_told(report, newest)[0] for report in reports if is_wrong and report.get("event") == rule.reasons]
    evidence = (*(told for told, _ in reported), *(_with_sureness(rule, result) for result in wrong), *reasons[-1:])
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


def _needed(rule: Rule, result: ConditionResult) -> int:
    """Return how many steps with its metric a condition needs."""
    return max(rule.min_steps, result.condition.min_steps)


def _sureness(rule: Rule, result: ConditionResult) -> str:
    """Return how sure a result is, if it comes from few values."""
    return f" (unsure: {len(result.steps)} of {rule.sure_steps} values)" if len(result.steps) < rule.sure_steps else ""


def _with_sureness(rule: Rule, result: ConditionResult) -> Evidence:
    return replace(result.evidence, text=result.evidence.text + _sureness(rule, result))


def _without_repeats(results: Sequence[ConditionResult]) -> list[ConditionResult]:
    """Return the first of the results that report the same about a metric over several windows."""
    return list({(result.metric, result.condition.says): result for result in reversed(results)}.values())[::-1]


def _explainers(rules: Mapping[str, Rule], found: Mapping[str, Finding]) -> dict[str, frozenset[str]]:
    """Return, for each finding, the rules whose findings explain it."""
    named = {name: frozenset(cause.rule for cause in rules[name].causes if cause.rule in found) for name in found}

    def is_before(cause: str, effect: str) -> bool:
        if effect in named[cause]:  # each may explain the other: the earlier one does
            return found[cause].since_step < found[effect].since_step
        slack = max(rules[effect].window, rules[effect].min_steps, NEAR)
        return found[cause].since_step <= found[effect].since_step + slack

    return {
        effect: frozenset(cause for cause in causes if cause is not None and is_before(cause, effect))
        for effect, causes in named.items()
    }


def _explain(
    rule: Rule, finding: Finding, explainers: Mapping[str, frozenset[str]], evaluator: RuleEvaluator
) -> Finding:
    """Return the finding with its causes."""
    because = explainers[rule.name]
    likely: list[Cause] = []
    possible: list[Cause] = []
    evidence = list(finding.evidence)
    for cause in rule.causes:
        if cause.rule is not None:
            if cause.rule in because:
                likely.append(cause)
        elif cause.sign is not None:
            signs = evaluator.found(cause.sign, rule)
            if signs:
                likely.append(cause)
                evidence.extend(result.evidence for result in signs)
        else:
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
    places = {rule: place for place, rule in enumerate(findings)}

    def key(rule: str) -> tuple[int, int, int, int]:
        worst = max(SEVERITY_RANKS[findings[one].severity] for one in {rule, *effects[rule]})
        return -worst, -len(effects[rule]), findings[rule].since_step, places[rule]

    left, ordered = set(findings), list[Finding]()
    while left:
        roots = [rule for rule in left if not (explainers[rule] - {rule}) & left] or list(left)
        first = min(roots, key=key)
        left.remove(first)
        ordered.append(findings[first])
    return tuple(ordered)


def _effects(rule: str, explainers: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return all findings that a finding explains, directly or through others."""
    known, fresh = {rule}, {rule}
    while fresh:
        fresh = {other for other, because in explainers.items() if because & fresh} - known
        known |= fresh
    return frozenset(known - {rule})


def _worst(checks: Sequence[Check]) -> Status:
    said = {check.status for check in checks}
    for status in WORST_FIRST:
        if status in said:
            return status
    return "unknown"


def _reading(
    rule: Rule, results: Sequence[ConditionResult], enough: Sequence[ConditionResult], evaluator: RuleEvaluator
) -> str:
    if enough:
        return "; ".join(dict.fromkeys(result.reading + _sureness(rule, result) for result in enough[:3]))
    if old := [result for result in results if result.is_old]:
        return old[0].reading
    if results:
        first = min(results, key=lambda result: _needed(rule, result) - len(result.steps))
        return f"{len(first.steps)} of the {_needed(rule, first)} steps needed"
    if not _due(rule, evaluator):
        return "judged at the end of the run"
    columns = list(dict.fromkeys(names for condition in rule.conditions for names in condition.needed))
    missing = [names for names in columns if not evaluator.has(names)]
    if not missing:
        return f"no step has finite values of {', '.join(' or '.join(names) for names in columns)}"
    return f"the run does not record {', '.join(' or '.join(names) for names in missing)}"


def _of_this_attempt(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    newest: list[Mapping[str, Any]] = []
    for event in events:
        if event.get("event") in BEGUN:
            newest = []
        else:
            newest.append(event)
    return newest


def _is_reported(rule: Rule, event: Mapping[str, Any]) -> bool:
    return any(event.get("event") == name and text in str(event.get("error")) for name, text in rule.events)


def _told(event: Mapping[str, Any], newest: int) -> tuple[Evidence, int]:
    step = event.get("step")
    since = step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else newest
    return Evidence(metric=str(event.get("event")), text=str(event.get("error"))[:MAX_ERROR_CHARS]), since
