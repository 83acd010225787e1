"""Findings of the health rules as problems with causes."""

import re
from collections.abc import Sequence
from dataclasses import replace

from rl_metrics.doctor.diagnosis import Cause, Diagnosis, Kind, NoFinding
from rl_metrics.health.finding import Evidence, Finding, Verdict
from rl_metrics.health.judging import judge_run
from rl_metrics.run_files.run_record import RunRecord

COVERED: dict[Kind, tuple[str, ...]] = {
    "mismatch": ("weights_proof", "engine_mismatch", "off_policy"),
    "memory": ("memory",),
}
"""Rules that the doctor's own diagnosis covers, by kind of problem."""


def add_health(run: RunRecord, *, known: Sequence[Diagnosis]) -> tuple[tuple[Diagnosis, ...], NoFinding | None]:
    """Return the known problems and those from the health rules; without findings, also the rules' state.

    A finding that no earlier one explains is a problem, unless a known problem covers its rule. A finding that follows
    from another is a line of that problem.

    Args:
        run: Record of the run.
        known: Problems found so far.
    """
    verdict = judge_run(run)
    if not verdict.findings:
        return tuple(known), _no_finding(verdict)
    diagnoses = list(known)
    covered = {rule: place for place, diagnosis in enumerate(known) for rule in COVERED.get(diagnosis.kind, ())}
    places: dict[str, int] = {}
    for finding in verdict.findings:
        cause = next((place for rule, place in places.items() if rule in finding.because), None)
        if finding.rule in covered:
            place = covered[finding.rule]
        elif cause is not None:
            place = cause
            diagnoses[place] = _with_effect(diagnoses[place], finding)
        else:
            place = len(diagnoses)
            diagnoses.append(_diagnosis(finding))
        places[finding.rule] = place
    return tuple(diagnoses), None


def _no_finding(verdict: Verdict) -> NoFinding:
    has_looked = any(check.status == "ok" for check in verdict.checks)
    text = f"no rule finds anything up to step {verdict.step}" if has_looked else "too few steps to judge"
    return NoFinding(kind="health", state="right" if has_looked else "unknown", text=text)


def _diagnosis(finding: Finding) -> Diagnosis:
    since = Evidence(metric=finding.rule, text=f"since step {finding.since_step} (rule {finding.rule})")
    return Diagnosis(
        kind="health",
        what=finding.what,
        evidence=tuple(dict.fromkeys((*finding.evidence, since))),
        causes=tuple(_cause(text, advice) for text, advice in zip(finding.causes, finding.advice, strict=True)),
    )


def _with_effect(diagnosis: Diagnosis, effect: Finding) -> Diagnosis:
    line = f"follows from it: {effect.what} (since step {effect.since_step}, rule {effect.rule})"
    return replace(diagnosis, details=(*diagnosis.details, line))


def _cause(text: str, advice: str) -> Cause:
    name = re.sub(r"[^a-z0-9]+", "_", text.partition(":")[0].lower()).strip("_")
    return Cause(name=name, title=text, advice=(advice,))
