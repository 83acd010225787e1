"""Diagnosis of a mismatch from metrics alone, if no logprobs per token were recorded."""

import math

import numpy as np

from rl_metrics.doctor.diagnosis import Cause, Diagnosis, NoFinding
from rl_metrics.doctor.mismatch_causes import (
    APART,
    EXACT,
    ROUNDED,
    STALE_KL,
    Facts,
    failed_proof,
    grows,
    with_evidence,
)
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.history import History

KL, K3 = "rollout_corr/kl", "rollout_corr/k3_kl"
PROBS, LOGPROBS = "training/rollout_probs_diff_mean", "training/rollout_logprobs_diff_mean"
STALENESS = ("training/staleness/mean", "fully_async/staleness/mean")
PROBS_DIFF = 0.01
"""Maximum mean difference of probabilities in healthy runs, if no logprobs were recorded."""

LOST_MASS = 0.4
"""Minimum share of k1 by which it exceeds k3 for truncated sampling; both are equal for full distributions."""

OLD = 0.5
"""Minimum mean age of the rollouts, in versions, that counts as old."""

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
    newest = {name: _newest(history, name) for name in most if len(history.finite(name))}
    if not (newest or proof):
        return NoFinding(kind="mismatch", state="unknown", text=f"{MISSING}; {' and '.join(most)} are missing too")
    texts = {name: f"{name} is at {value:.3g}; up to {most[name]:g} is normal" for name, value in newest.items()}
    if not proof and all(value <= most[name] for name, value in newest.items()):
        return NoFinding(kind="mismatch", state="right", text="; ".join((*texts.values(), MISSING)))
    evidence = [Evidence(metric=name, text=text, value=newest[name]) for name, text in texts.items()]
    others = [cause for cause in _causes(history, facts) if not proof or cause.name != proof.name]
    return Diagnosis(
        kind="mismatch",
        what=APART,
        evidence=(*evidence, Evidence(metric="rollouts.jsonl", text=MISSING)),
        causes=(proof, *others) if proof else tuple(others),
    )


def _causes(history: History, facts: Facts) -> list[Cause]:
    causes = []
    staleness = next((_newest(history, name) for name in STALENESS if len(history.finite(name))), 0.0)
    name = next((name for name in (PROBS, LOGPROBS) if len(history.finite(name))), K3)
    column = history.finite(name)
    third = len(column) // 3
    first, later = column[:third], column[len(column) - third :]
    if third >= 2 and grows(first, later):
        text = f"{name} was {first.mean():.3g} in the first third of the steps and is {later.mean():.3g} in the last"
        causes.append(with_evidence("stale_rollouts" if staleness >= OLD else "stale_weights", text, metric=name))
    elif staleness >= OLD:
        text = f"rollouts are {staleness:.3g} versions old"
        causes.append(with_evidence("stale_rollouts", text, metric=STALENESS[0]))
    k1 = _newest(history, KL)
    lost = k1 - _newest(history, K3)
    if lost > EXACT and lost >= LOST_MASS * k1:
        text = (
            f"k1 is above k3 by {lost:.3g}: the mean ratio is {1.0 - lost:.4f}, the learner's probability of the "
            "tokens that the engine can sample"
        )
        causes.insert(0, with_evidence("truncation", text, *facts.cuts, metric=KL))
    return causes


def _newest(history: History, name: str) -> float:
    """Return the median of the newest values of a metric; NaN if no step has one."""
    values = history.finite(name)[-20:]
    return float(np.median(values)) if len(values) else math.nan
