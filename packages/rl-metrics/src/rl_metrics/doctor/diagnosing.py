"""The doctor's complete diagnosis of one run."""

from dataclasses import replace

from rl_metrics.doctor.diagnosis import Ailment, Diagnosis, Reading
from rl_metrics.doctor.facts import facts_of
from rl_metrics.doctor.hang import judge_hang
from rl_metrics.doctor.limits import MIN_TOKENS
from rl_metrics.doctor.memory_growth import judge_memory
from rl_metrics.doctor.mismatch_by_metrics import judge_metrics
from rl_metrics.doctor.mismatch_by_tokens import judge_tokens
from rl_metrics.doctor.sickness import judge_health
from rl_metrics.doctor.token_pairs import read_pairs
from rl_metrics.health.run_verdict import without_measuring
from rl_metrics.run_files.run_record import RunRecord


def diagnose(run: RunRecord) -> Diagnosis:
    """Diagnose a run's problems and their causes from its records.

    Raises:
        OSError: A file cannot be read.
    """
    looks: tuple[Ailment | Reading, ...] = (
        judge_hang(run),
        _judge_mismatch(run),
        judge_memory(run.history, run.events),
    )
    if run.is_imported:
        looks = tuple(map(_of_import, looks))
    known = [look for look in looks if isinstance(look, Ailment)]
    readings = [look for look in looks if isinstance(look, Reading)]
    ailments, reading = judge_health(run, known=known)
    if reading is not None:
        readings.append(reading)
    return Diagnosis(run=run.name, ailments=ailments, readings=tuple(readings))


def _of_import(look: Ailment | Reading) -> Ailment | Reading:
    """Remove advice that applies only to runs of this project."""
    if isinstance(look, Reading):
        return replace(look, text=without_measuring(look.text))
    evidence = (replace(one, text=without_measuring(one.text)) for one in look.evidence)
    causes = (replace(one, advice=tuple(filter(None, map(without_measuring, one.advice)))) for one in look.causes)
    return replace(look, evidence=tuple(evidence), causes=tuple(causes))


def _judge_mismatch(run: RunRecord) -> Ailment | Reading:
    facts = facts_of(run)
    pairs = read_pairs(run.rollouts())
    if len(pairs) < MIN_TOKENS:
        return judge_metrics(run.history, facts)
    return judge_tokens(pairs, facts)
