"""Diagnosis of a mismatch from metrics alone, if no logprobs per token were recorded."""

import numpy as np

from rl_metrics.doctor.diagnosis import Cause, Diagnosis, NoFinding
from rl_metrics.doctor.facts import Facts
from rl_metrics.doctor.limits import EXACT, LOST_MASS, PROBS_DIFF, ROUNDED, STALE_KL, grows
from rl_metrics.doctor.mismatch_causes import APART, failed_proof, with_evidence
from rl_metrics.doctor.token_pairs import Floats
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.history import History

KL, K3 = "rollout_corr/kl", "rollout_corr/k3_kl"
PROBS, LOGPROBS = "training/rollout_probs_diff_mean", "training/rollout_logprobs_diff_mean"
STALENESS = ("training/staleness/mean", "fully_async/staleness/mean")
MISSING = (
    "fewer than 30 tokens have both logprobs, rollout_logprobs and policy_logprobs in rollouts.jsonl, so only some "
    "causes can be distinguished; set metrics.log_rollouts"
)


def diagnose_metrics(history: History, facts: Facts) -> Diagnosis | NoFinding:
    """Diagnose a mismatch from the metrics of a run.

    Args:
        history: Metrics of the run.
        facts: Facts from its settings, metrics and events.
    """
    proof = failed_proof(facts)
    most = {
        PROBS: EXACT if facts.is_exact else PROBS_DIFF,
        LOGPROBS: EXACT if facts.is_exact else ROUNDED,
        K3: STALE_KL,
    }
    late = [(name, float(np.median(column[-20:]))) for name in most if len(column := _finite(history, name))]
    if not late and proof is None:
        return NoFinding(kind="mismatch", state="unknown", text=f"{MISSING}; {' and '.join(most)} are missing too")
    evidence = tuple(
        Evidence(metric=name, text=f"{name} is at {value:.3g}; up to {most[name]:g} is normal", value=value)
        for name, value in late
    )
    if proof is None and all(value <= most[name] for name, value in late):
        text = "; ".join(one.text for one in evidence)
        return NoFinding(kind="mismatch", state="right", text=f"{text}; {MISSING}")
    others = [cause for cause in _causes(history, facts) if proof is None or cause.name != proof.name]
    return Diagnosis(
        kind="mismatch",
        what=APART,
        evidence=(*evidence, Evidence(metric="rollouts.jsonl", text=MISSING)),
        causes=((proof,) if proof else ()) + tuple(others),
    )


def _causes(history: History, facts: Facts) -> list[Cause]:
    causes = []
    stale = next((column for name in STALENESS if len(column := _finite(history, name))), np.zeros(0))
    is_old = bool(len(stale)) and float(np.median(stale[-20:])) >= 0.5
    name = next((name for name in (PROBS, LOGPROBS) if len(_finite(history, name))), K3)
    column = _finite(history, name)
    third = len(column) // 3
    first, later = column[:third], column[len(column) - third :]
    if third >= 2 and grows(first, later):
        text = f"{name} was {first.mean():.3g} in the first third of the steps and is {later.mean():.3g} in the last"
        causes.append(with_evidence("stale_rollouts" if is_old else "stale_weights", text, metric=name))
    elif is_old:
        text = f"rollouts are {float(np.median(stale[-20:])):.3g} versions old"
        causes.append(with_evidence("stale_rollouts", text, metric=STALENESS[0]))
    k1, k3 = _finite(history, KL), _finite(history, K3)
    if len(k1) and len(k3):
        lost = float(np.median(k1[-20:])) - float(np.median(k3[-20:]))
        if lost > EXACT and lost >= LOST_MASS * float(np.median(k1[-20:])):
            text = (
                f"k1 is above k3 by {lost:.3g}: the mean ratio is {1.0 - lost:.4f}, the learner's probability of "
                "the tokens that the engine can sample"
            )
            causes.insert(0, with_evidence("truncation", text, *facts.cuts, metric=KL))
    return causes


def _finite(history: History, name: str) -> Floats:
    column = history.get(name)
    return column[np.isfinite(column)] if column is not None else np.zeros(0)
