"""Findings of the health rules as problems with causes."""

import re
from collections.abc import Sequence
from dataclasses import replace

from rl_metrics.doctor.diagnosis import Ailment, Cause, Kind, Reading
from rl_metrics.health.finding import Evidence, Finding, Verdict
from rl_metrics.health.run_verdict import judge_run
from rl_metrics.run_files.run_record import RunRecord

COVERED: dict[Kind, tuple[str, ...]] = {
    "mismatch": ("weights_proof", "engine_mismatch", "off_policy"),
    "memory": ("memory",),
}
"""Rules that the doctor's own diagnosis covers, by kind of problem."""


def judge_health(run: RunRecord, *, known: Sequence[Ailment]) -> tuple[tuple[Ailment, ...], Reading | None]:
    """Return the known problems and those from the health rules, or a reading if the rules find nothing.

    A finding that no earlier one explains is a problem, unless a known problem covers its rule. A finding that follows
    from another is a line of that problem.

    Args:
        run: Record of the run.
        known: Problems found so far.
    """
    verdict = judge_run(run)
    if not verdict.findings:
        return tuple(known), _reading(verdict)
    ailments = list(known)
    covered = {rule: place for place, ailment in enumerate(known) for rule in COVERED.get(ailment.kind, ())}
    places: dict[str, int] = {}
    for finding in verdict.findings:
        cause = next((place for rule, place in places.items() if rule in finding.because), None)
        if finding.rule in covered:
            place = covered[finding.rule]
        elif cause is not None:
            place = cause
            ailments[place] = _with_effect(ailments[place], finding)
        else:
            place = len(ailments)
            ailments.append(_ailment(finding))
        places[finding.rule] = place
    return tuple(ailments), None


def _reading(verdict: Verdict) -> Reading:
    has_looked = any(check.status == "ok" for check in verdict.checks)
    text = f"no rule finds anything up to step {verdict.step}" if has_looked else "too few steps to judge"
    return Reading(kind="health", state="right" if has_looked else "unknown", text=text)


def _ailment(finding: Finding) -> Ailment:
    since = Evidence(metric=finding.rule, text=f"since step {finding.since_step} (rule {finding.rule})")
    return Ailment(
        kind="health",
        what=finding.what,
        evidence=tuple(dict.fromkeys((*finding.evidence, since))),
        causes=tuple(_cause(text, advice) for text, advice in zip(finding.causes, finding.advice, strict=True)),
    )


def _with_effect(ailment: Ailment, effect: Finding) -> Ailment:
    line = f"follows from it: {effect.what} (since step {effect.since_step}, rule {effect.rule})"
    return replace(ailment, details=(*ailment.details, line))


def _cause(text: str, advice: str) -> Cause:
    name = re.sub(r"[^a-z0-9]+", "_", text.partition(":")[0].lower()).strip("_")
    return Cause(name=name, title=text, advice=(advice,))
