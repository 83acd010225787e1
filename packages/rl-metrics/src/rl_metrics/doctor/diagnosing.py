"""The doctor's complete report on one run: its own diagnoses, then the findings of the health rules."""

import re
from collections.abc import Sequence
from dataclasses import replace

from rl_metrics.doctor.diagnosis import Cause, Diagnosis, DoctorReport, Kind, NoFinding
from rl_metrics.doctor.hang import diagnose_hang
from rl_metrics.doctor.memory_growth import diagnose_memory
from rl_metrics.doctor.mismatch import diagnose_mismatch
from rl_metrics.health.finding import Evidence, Finding
from rl_metrics.health.judging import judge_run, without_measuring
from rl_metrics.run_files.run_record import RunRecord

COVERED: dict[Kind, tuple[str, ...]] = {
    "mismatch": ("weights_proof", "engine_mismatch", "off_policy"),
    "memory": ("memory",),
}
"""Rules that the doctor's own diagnosis covers, by kind of problem."""


def diagnose(run: RunRecord) -> DoctorReport:
    """Diagnose a run's problems and their causes from its records.

    Raises:
        OSError: A file cannot be read.
    """
    results = [diagnose_hang(run), diagnose_mismatch(run), diagnose_memory(run.history, run.events)]
    if run.is_imported:
        results = list(map(_of_import, results))
    known = [result for result in results if isinstance(result, Diagnosis)]
    diagnoses, no_findings = add_health(run, known=known)
    own = (result for result in results if isinstance(result, NoFinding))
    return DoctorReport(run=run.name, diagnoses=diagnoses, no_findings=(*own, *no_findings))


def _of_import(result: Diagnosis | NoFinding) -> Diagnosis | NoFinding:
    """Remove advice that applies only to runs of this project."""
    if isinstance(result, NoFinding):
        return replace(result, text=without_measuring(result.text))
    evidence = (replace(reason, text=without_measuring(reason.text)) for reason in result.evidence)
    causes = (
        replace(cause, advice=tuple(filter(None, map(without_measuring, cause.advice)))) for cause in result.causes
    )
    return replace(result, evidence=tuple(evidence), causes=tuple(causes))


def add_health(run: RunRecord, *, known: Sequence[Diagnosis]) -> tuple[tuple[Diagnosis, ...], tuple[NoFinding, ...]]:
    """Return the known problems and those from the health rules; without findings, also the rules' state.

    A finding that no earlier one explains is a problem, unless a known problem covers its rule. A finding that follows
    from another is a line of that problem.

    Args:
        run: Record of the run.
        known: Problems found so far.
    """
    verdict = judge_run(run)
    if not verdict.findings:
        is_judged = any(check.status == "ok" for check in verdict.checks)
        text = f"no rule finds anything up to step {verdict.step}" if is_judged else "too few steps to judge"
        return tuple(known), (NoFinding(kind="health", state="right" if is_judged else "unknown", text=text),)
    diagnoses = list(known)
    covered = {rule: place for place, diagnosis in enumerate(known) for rule in COVERED.get(diagnosis.kind, ())}
    places: dict[str, int] = {}
    for finding in verdict.findings:
        explaining = next((place for rule, place in places.items() if rule in finding.because), None)
        if finding.rule in covered:
            place = covered[finding.rule]
        elif explaining is not None:
            place = explaining
            line = f"follows from it: {finding.what} (since step {finding.since_step}, rule {finding.rule})"
            diagnoses[place] = replace(diagnoses[place], details=(*diagnoses[place].details, line))
        else:
            place = len(diagnoses)
            diagnoses.append(_diagnosis(finding))
        places[finding.rule] = place
    return tuple(diagnoses), ()


def _diagnosis(finding: Finding) -> Diagnosis:
    since = Evidence(metric=finding.rule, text=f"since step {finding.since_step} (rule {finding.rule})")
    return Diagnosis(
        kind="health",
        what=finding.what,
        evidence=tuple(dict.fromkeys((*finding.evidence, since))),
        causes=tuple(_cause(text, advice) for text, advice in zip(finding.causes, finding.advice, strict=True)),
    )


def _cause(text: str, advice: str) -> Cause:
    name = re.sub(r"[^a-z0-9]+", "_", text.partition(":")[0].lower()).strip("_")
    return Cause(name=name, title=text, advice=(advice,))
