"""A verdict, and the rules, as text: for a terminal, a file of a CI job, or the page docs/guides/health.md."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from rl_core.records import Json
from rl_metrics.health.finding import SIDES, Finding, Side, Status, Verdict
from rl_metrics.health.rules import Rule, Threshold

MARKS: dict[Status, str] = {"ok": "ok", "warning": "WARNING", "critical": "CRITICAL", "unknown": "?"}
SIDE_TITLES: dict[Side, str] = {
    "task": "Task: does it learn what it is rewarded for",
    "convergence": "Convergence: does the policy move, and not too far at a time",
    "stability": "Stability: is what trains sound, and are engine and learner one policy",
    "efficiency": "Efficiency: where time and memory go",
}


def verdict_lines(verdict: Verdict, *, name: str) -> Iterator[str]:
    """The checklist by side, then the findings.

    Args:
        verdict: Of the run.
        name: Of the run.
    """
    known = sum(check.status != "unknown" for check in verdict.checks)
    yield f"{name}: {verdict.status} at step {verdict.step} ({known} of {len(verdict.checks)} checks could be made)"
    width = max((len(check.rule) for check in verdict.checks), default=0)
    for side in SIDES:
        checks = [check for check in verdict.checks if check.side == side]
        if checks:
            yield ""
            yield SIDE_TITLES[side]
        for check in checks:
            yield f"  {MARKS[check.status]:<8}  {check.rule:<{width}}  {check.title}: {check.reading}"
    for finding in verdict.findings:
        yield ""
        yield from finding_lines(finding)


def finding_lines(finding: Finding) -> Iterator[str]:
    """What is wrong, on what evidence, why, and what to try."""
    yield f"{finding.severity.upper()} {finding.rule}, since step {finding.since_step}: {finding.what}"
    for evidence in finding.evidence:
        yield f"  evidence: {evidence.text}"
    for number, (cause, advice) in enumerate(zip_longest(finding.causes, finding.advice), start=1):
        if cause is not None:
            yield f"  cause {number}:  {cause}"
        if advice is not None:
            yield f"     try:    {advice}"


def rule_lines(rules: Iterable[Rule]) -> Iterator[str]:
    """Each rule with its thresholds."""
    rules = tuple(rules)
    for side in SIDES:
        yield SIDE_TITLES[side]
        for rule in rules:
            if rule.side == side:
                yield f"  {rule.name} ({rule.severity}): {rule.title}"
                yield f"      reads {', '.join(metrics_of(rule))}; {_steps(rule)}"
                for threshold in rule.thresholds:
                    yield f"      {rule.name}.{_described(threshold)}"


def rules_markdown(rules: Iterable[Rule]) -> str:
    """A table for each side."""
    rules = tuple(rules)
    parts = []
    for side in SIDES:
        parts.append(f"### {SIDE_TITLES[side]}\n")
        parts.append("| rule | what is wrong | severity | metrics | thresholds | looks at | likely causes, in order |")
        parts.append("|---|---|---|---|---|---|---|")
        parts.extend(_markdown_row(rule) for rule in rules if rule.side == side)
        parts.append("")
    return "\n".join(parts)


def rules_json(rules: Iterable[Rule]) -> list[Json]:
    """The rules as objects."""
    return [
        {
            "name": rule.name,
            "side": rule.side,
            "title": rule.title,
            "what": rule.what,
            "severity": rule.severity,
            "metrics": list(metrics_of(rule)),
            "window": rule.window,
            "min_steps": rule.min_steps,
            "thresholds": [
                {"name": f"{rule.name}.{one.name}", "value": one.default, "meaning": one.meaning, "source": one.source}
                for one in rule.thresholds
            ],
            "causes": [cause.text for cause in rule.causes],
            "advice": [cause.advice for cause in rule.causes],
        }
        for rule in rules
    ]


def metrics_of(rule: Rule) -> Sequence[str]:
    """Names of the metrics that a rule's probes read, without those that only excuse it."""
    return tuple(dict.fromkeys(name for probe in rule.probes for names in probe.reads for name in names))


def _steps(rule: Rule) -> str:
    return f"window of {rule.window}, at least {rule.min_steps} steps"


def _described(threshold: Threshold) -> str:
    return f"{threshold.name} = {threshold.default:g}: {threshold.meaning} ({threshold.source})"


def _markdown_row(rule: Rule) -> str:
    metrics = ", ".join(f"`{name}`" for name in metrics_of(rule))
    thresholds = "; ".join(
        f"`{rule.name}.{one.name}` = {one.default:g}: {one.meaning} ({one.source})" for one in rule.thresholds
    )
    causes = "; ".join(dict.fromkeys(cause.text for cause in rule.causes))
    cells = (f"`{rule.name}`", rule.what, rule.severity, metrics, thresholds, _steps(rule), causes)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
