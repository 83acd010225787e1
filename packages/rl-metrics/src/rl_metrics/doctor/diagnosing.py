"""The doctor's complete report on one run."""

from dataclasses import replace

from rl_metrics.doctor.diagnosis import Diagnosis, DoctorReport, NoFinding
from rl_metrics.doctor.hang import diagnose_hang
from rl_metrics.doctor.memory_growth import diagnose_memory
from rl_metrics.doctor.mismatch import diagnose_mismatch
from rl_metrics.doctor.other_findings import add_health
from rl_metrics.health.judging import without_measuring
from rl_metrics.run_files.run_record import RunRecord


def diagnose(run: RunRecord) -> DoctorReport:
    """Diagnose a run's problems and their causes from its records.

    Raises:
        OSError: A file cannot be read.
    """
    results: list[Diagnosis | NoFinding] = [
        diagnose_hang(run),
        diagnose_mismatch(run),
        diagnose_memory(run.history, run.events),
    ]
    if run.is_imported:
        results = list(map(_of_import, results))
    known = [result for result in results if isinstance(result, Diagnosis)]
    no_findings = [result for result in results if isinstance(result, NoFinding)]
    diagnoses, no_finding = add_health(run, known=known)
    if no_finding is not None:
        no_findings.append(no_finding)
    return DoctorReport(run=run.name, diagnoses=diagnoses, no_findings=tuple(no_findings))


def _of_import(result: Diagnosis | NoFinding) -> Diagnosis | NoFinding:
    """Remove advice that applies only to runs of this project."""
    if isinstance(result, NoFinding):
        return replace(result, text=without_measuring(result.text))
    evidence = (replace(one, text=without_measuring(one.text)) for one in result.evidence)
    causes = (replace(one, advice=tuple(filter(None, map(without_measuring, one.advice)))) for one in result.causes)
    return replace(result, evidence=tuple(evidence), causes=tuple(causes))
