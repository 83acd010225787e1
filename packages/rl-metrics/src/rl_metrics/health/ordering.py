"""The order of findings: what explains others comes first."""

from collections.abc import Mapping

from rl_metrics.health.finding import RANKS, Finding


def in_order(findings: Mapping[str, Finding], explainers: Mapping[str, frozenset[str]]) -> tuple[Finding, ...]:
    """Findings so that each comes after those that explain it.

    Of those that nothing left explains, the one comes first that has, with all that it explains, the worst severity;
    then the one that explains most; then the one that began first.

    Args:
        findings: By rule, in the order of the rules.
        explainers: The rules whose findings explain that of each rule.
    """
    effects = {rule: _effects(rule, explainers) for rule in findings}
    places = {rule: place for place, rule in enumerate(findings)}

    def key(rule: str) -> tuple[int, int, int, int]:
        worst = max(RANKS[findings[one].severity] for one in {rule, *effects[rule]})
        return -worst, -len(effects[rule]), findings[rule].since_step, places[rule]

    left, ordered = set(findings), list[Finding]()
    while left:
        roots = [rule for rule in left if not (explainers[rule] - {rule}) & left] or list(left)
        first = min(roots, key=key)
        left.remove(first)
        ordered.append(findings[first])
    return tuple(ordered)


def _effects(rule: str, explainers: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """All findings that a finding explains, directly or through others."""
    known, fresh = {rule}, {rule}
    while fresh:
        fresh = {other for other, because in explainers.items() if because & fresh} - known
        known |= fresh
    return frozenset(known - {rule})
