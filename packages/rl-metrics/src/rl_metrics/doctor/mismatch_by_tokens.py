"""Diagnosis of a mismatch from the engine's and the learner's logprobs of the same tokens."""

from rl_metrics.doctor.diagnosis import Ailment, Cause, Reading
from rl_metrics.doctor.facts import Facts
from rl_metrics.doctor.limits import (
    CANARY_EXACT,
    CANARY_ROUNDED,
    EXACT,
    LEAST_LEFT_OVER,
    LEAST_SHARE,
    MIN_TOKENS,
    ROUNDED,
    STALE_KL,
)
from rl_metrics.doctor.mismatch_causes import merged, with_evidence
from rl_metrics.doctor.mismatch_signs import SIGNS, Scene, Sign, remainder, routing, truncation
from rl_metrics.doctor.token_pairs import TokenPairs
from rl_metrics.doctor.token_statistics import Size, measure
from rl_metrics.health.finding import Evidence

EXPECTED = ("precision", "stale_rollouts")
"""Causes that are normal with some settings, up to a size."""
LEFT_OVER = ("precision", "other_computation")
"""Causes of the rest that no other cause explains."""


def judge_tokens(pairs: TokenPairs, facts: Facts) -> Ailment | Reading:
    """Diagnose a mismatch from the tokens of a run.

    Args:
        pairs: Tokens of the run.
        facts: Facts from its settings, metrics and events.
    """
    size = measure(pairs)
    proof = proof_of_staleness(facts)
    if size.tokens < MIN_TOKENS:
        if proof:
            return Ailment(kind="mismatch", what="The engine does not have the learner's weights.", causes=(proof,))
        text = f"{size.tokens} tokens have both logprobs; at least {MIN_TOKENS} are needed"
        return Reading(kind="mismatch", state="unknown", text=text)
    said = f"{size.mean_abs:.2g} nats on average over {size.tokens} tokens, k3 KL {size.k3_kl:.2g}"
    if size.mean_abs <= EXACT and proof is None:
        text = f"engine and learner agree: {said}; float32 explains up to {EXACT:g}"
        return Reading(kind="mismatch", state="right", text=text)
    signs = rank_signs(pairs, facts, is_proven=proof is not None) if size.mean_abs > EXACT else []
    named = named_causes(signs, proof)
    if proof is None and is_expected(named, size, facts):
        why = " and ".join(cause.title.partition(":")[0] for cause in named)
        return Reading(kind="mismatch", state="right", text=f"engine and learner differ by {said}: {why} explains it")
    names = {cause.name for cause in named}
    against = tuple((sign.name, "; ".join(sign.texts)) for sign in signs if _speaks_against(sign, names))
    return Ailment(
        kind="mismatch",
        what="Engine and learner assign different probabilities to the same tokens.",
        evidence=size_evidence(size),
        causes=named,
        against=against,
    )


def rank_signs(pairs: TokenPairs, facts: Facts, *, is_proven: bool = False) -> list[Sign]:
    """Return the sign of each cause, largest first.

    Args:
        pairs: Tokens of the run.
        facts: Facts from its settings, metrics and events.
        is_proven: Whether a weight proof shows that the engine lacks the learner's weights.
    """
    scene = Scene.begin(pairs, facts)
    signs = [look(scene) for look in SIGNS]
    cut = truncation(scene)
    signs.append(cut)
    signs.append(routing(scene, is_cut=cut.nats > 0.0))
    explained = sum(sign.nats for sign in signs)
    total = measure(pairs).mean_abs
    signs.append(remainder(scene, max(total - explained, 0.0), is_proven=is_proven))
    return sorted(signs, key=lambda sign: -sign.nats)


def named_causes(signs: list[Sign], proof: Cause | None) -> tuple[Cause, ...]:
    """Return the causes with a large enough share, a failed proof first."""
    total = max(sum(sign.nats for sign in signs), 1e-12)
    causes = [] if proof is None else [proof]
    is_told = any(sign.nats / total >= LEAST_SHARE for sign in signs if sign.name not in LEFT_OVER)
    for sign in signs:
        share = sign.nats / total
        least = LEAST_LEFT_OVER if is_told and sign.name in LEFT_OVER else LEAST_SHARE
        if share >= least:
            causes.append(with_evidence(sign.name, *sign.texts, share=share))
    return merged(causes)


def _speaks_against(sign: Sign, named: set[str]) -> bool:
    return sign.name not in named and sign.name not in LEFT_OVER and not sign.nats


def is_expected(causes: tuple[Cause, ...], size: Size, facts: Facts) -> bool:
    """Return whether the settings explain the difference, and it is small enough to train on."""
    names = {cause.name for cause in causes}
    if not names <= set(EXPECTED):
        return False
    if "precision" in names and (facts.is_exact or size.mean_abs > ROUNDED):
        return False
    return "stale_rollouts" not in names or size.k3_kl <= STALE_KL


def proof_of_staleness(facts: Facts) -> Cause | None:
    """Return stale weights as a cause if a weight proof failed or its canary differs, else None."""
    texts = []
    if facts.proof_failures:
        said = f": {facts.proof_error}" if facts.proof_error else ""
        texts.append(f"the proof of a weight update failed {facts.proof_failures} times{said}")
    bound = CANARY_EXACT if facts.is_exact else CANARY_ROUNDED
    if facts.canary is not None and facts.canary > bound:
        texts.append(f"weights/canary_max_diff reached {facts.canary:.2g} nats; up to {bound:g} is normal")
    return with_evidence("stale_weights", *texts, metric="weights/canary_max_diff") if texts else None


def size_evidence(size: Size) -> tuple[Evidence, ...]:
    """Return the size of the difference as evidence."""
    rows = (
        (f"{size.mean_abs:.3g} nats on average over {size.tokens} tokens, {size.largest:.3g} at most", size.mean_abs),
        (f"KL by k1 {size.k1_kl:.3g}, by k3 {size.k3_kl:.3g} nats", size.k3_kl),
        (f"the learner's perplexity of a response is {size.ppl_ratio:.4g} times the engine's", size.ppl_ratio),
    )
    return tuple(Evidence(metric="rollouts.jsonl", text=text, value=value) for text, value in rows)
