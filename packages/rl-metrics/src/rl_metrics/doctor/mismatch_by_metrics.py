"""Diagnosis of a mismatch from metrics alone, if no logprobs per token were recorded."""

import numpy as np

from rl_metrics.doctor.diagnosis import Ailment, Cause, Reading
from rl_metrics.doctor.facts import Facts
from rl_metrics.doctor.limits import CERTAIN, EXACT, GROWTH, LOST_MASS, PROBS_DIFF, ROUNDED, STALE_KL
from rl_metrics.doctor.mismatch_by_tokens import proof_of_staleness
from rl_metrics.doctor.mismatch_causes import merged, with_evidence
from rl_metrics.doctor.token_pairs import Floats
from rl_metrics.doctor.token_statistics import rank_sum_z
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.history import History

KL, K3 = "rollout_corr/kl", "rollout_corr/k3_kl"
PROBS, LOGPROBS = "training/rollout_probs_diff_mean", "training/rollout_logprobs_diff_mean"
STALENESS = ("training/staleness/mean", "fully_async/staleness/mean")
MISSING = (
    "no token has both logprobs (rollouts.jsonl with rollout_logprobs and policy_logprobs), so template, temperature, "
    "precision and routing cannot be distinguished; set metrics.log_rollouts"
)


def judge_metrics(history: History, facts: Facts) -> Ailment | Reading:
    """Diagnose a mismatch from the metrics of a run.

    Args:
        history: Metrics of the run.
        facts: Facts from its settings, metrics and events.
    """
    proof = proof_of_staleness(facts)
    most = {
        PROBS: EXACT if facts.is_exact else PROBS_DIFF,
        LOGPROBS: EXACT if facts.is_exact else ROUNDED,
        K3: STALE_KL,
    }
    late = [(name, float(np.median(column[-20:]))) for name in most if len(column := _finite(history, name))]
    if not late and proof is None:
        return Reading(kind="mismatch", state="unknown", text=f"{MISSING}; {' and '.join(most)} are missing too")
    evidence = tuple(
        Evidence(metric=name, text=f"{name} is at {value:.3g}; up to {most[name]:g} is normal", value=value)
        for name, value in late
    )
    if proof is None and all(value <= most[name] for name, value in late):
        text = "; ".join(one.text for one in evidence)
        return Reading(kind="mismatch", state="right", text=f"{text}; {MISSING}")
    causes = [*([proof] if proof else []), *_causes(history, facts)]
    return Ailment(
        kind="mismatch",
        what="Engine and learner assign different probabilities to the same tokens.",
        evidence=(*evidence, Evidence(metric="rollouts.jsonl", text=MISSING)),
        causes=merged(causes),
    )


def _causes(history: History, facts: Facts) -> list[Cause]:
    causes = []
    stale = next((column for name in STALENESS if len(column := _finite(history, name))), np.zeros(0))
    is_old = bool(len(stale)) and float(np.median(stale[-20:])) >= 0.5
    name = next((name for name in (PROBS, LOGPROBS) if len(_finite(history, name))), K3)
    column = _finite(history, name)
    first, later = column[: max(len(column) // 10, 1)], column[len(column) // 2 :]
    if len(column) >= 6 and later.mean() >= GROWTH * max(first.mean(), 1e-5):
        z = rank_sum_z(column[: len(column) // 3], column[-(len(column) // 3) :])
        if z >= CERTAIN / 2.0:
            begun = f"{first.mean():.3g} in the first recorded steps"
            text = f"{name} was {begun} and is {later.mean():.3g} in the second half"
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
