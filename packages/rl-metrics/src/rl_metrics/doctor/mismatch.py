"""Diagnosis of a mismatch from the engine's and the learner's logprobs of the same tokens.

The mean difference is compared by position in the response, by age of the weights and by step, and by its direction.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_metrics.doctor.diagnosis import Cause, Diagnosis, NoFinding
from rl_metrics.doctor.mismatch_by_metrics import diagnose_metrics
from rl_metrics.doctor.mismatch_causes import (
    APART,
    CERTAIN,
    EXACT,
    ROUNDED,
    STALE_KL,
    Facts,
    facts_of,
    failed_proof,
    grows,
    with_evidence,
)
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.history import FloatColumn, IntColumn
from rl_metrics.run_files.rollout_log import RolloutRow
from rl_metrics.run_files.run_record import RunRecord

Bools = NDArray[np.bool_]

UNKNOWN_VERSION = -1
MOST_LOGPROB = 1e-3
"""Maximum valid logprob: 0 apart from rounding."""
MAX_TOKENS = 400_000
"""Maximum number of tokens. Beyond it, every second trajectory is dropped repeatedly, to keep the whole run covered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPairs:
    """Sampled tokens with logprobs of both sides; all columns are [N].

    Attributes:
        diff: float64, the learner's logprob before its update minus the engine's.
        version: int64, version of the weights that sampled the token, according to the engine; -1 if unknown.
        policy_version: int64, version of the learner before its update.
        step: int64, step that trained the token.
        position: int64, position in the response, from 0.
    """

    diff: FloatColumn
    version: IntColumn
    policy_version: IntColumn
    step: IntColumn
    position: IntColumn

    def __len__(self) -> int:
        return len(self.diff)

    @property
    def staleness(self) -> IntColumn:
        """Versions between the engine's weights and the learner's; -1 if unknown."""
        age = np.maximum(self.policy_version - self.version, 0)
        behind: IntColumn = np.where(self.version < 0, UNKNOWN_VERSION, age)
        return behind


def read_pairs(rows: Iterable[RolloutRow]) -> TokenPairs:
    """Return the tokens of trajectories; trajectories without both columns have none."""
    parts: list[FloatColumn] = []
    num_tokens, stride = 0, 1
    for index, row in enumerate(rows):
        if index % stride or (part := _columns(row)) is None:
            continue
        parts.append(part)
        num_tokens += part.shape[1]
        while num_tokens > MAX_TOKENS and len(parts) > 1:
            stride *= 2
            parts = parts[::2]
            num_tokens = sum(part.shape[1] for part in parts)
    diff, *others = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0))
    version, policy_version, step, position = (np.clip(column, -1.0, 2.0**62).astype(np.int64) for column in others)
    return TokenPairs(diff=diff, version=version, policy_version=policy_version, step=step, position=position)


def _columns(row: RolloutRow) -> FloatColumn | None:
    """Return the [5, n] columns of one trajectory, or None without a token to compare."""
    if not {"rollout_logprobs", "policy_logprobs"} <= row.columns.keys() or not row.tokens:
        return None
    size = len(row.tokens)
    rollout, policy = (np.array(row.columns[name]) for name in ("rollout_logprobs", "policy_logprobs"))
    is_known = np.array(row.mask, dtype=bool) & np.isfinite(rollout) & np.isfinite(policy)
    is_known &= (rollout <= MOST_LOGPROB) & (policy <= MOST_LOGPROB)
    version = np.array(row.columns.get("versions", (UNKNOWN_VERSION,) * size), dtype=np.float64)
    try:
        same = [np.full(size, float(value)) for value in (row.policy_version, row.step)]
    except OverflowError:  # a version beyond every float
        return None
    part: FloatColumn = np.stack([policy - rollout, version, *same, np.arange(float(size))])[:, is_known]
    return part if part.size else None


MIN_TOKENS = 30
"""Minimum number of tokens for a diagnosis: a mean of 30 has a fifth of one value's spread."""

ONE_SIDED = 0.15
"""Maximum share of upward differences for truncated sampling, which has none; other causes have about half."""

FIRST_TOKENS = 4
"""Tokens of a response that count as its first, of responses with at least four times as many."""
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """The mean absolute difference of two groups of tokens, in nats.

    Attributes:
        name: Cause that makes the second group differ more.
        usual: [N] bool, the first group.
        affected: Mean of the second group.
        share: Share of the whole difference that the second group has in excess of the first.
        is_certain: Whether the second differs more, beyond chance and rounding.
        text: Both means, in words.
    """

    name: str
    usual: Bools
    affected: float
    share: float
    is_certain: bool
    text: str


def diagnose_mismatch(run: RunRecord) -> Diagnosis | NoFinding:
    """Diagnose a mismatch from tokens if the run recorded enough of them, else from its metrics."""
    facts = facts_of(run)
    pairs = read_pairs(run.rollouts())
    return diagnose_tokens(pairs, facts) if len(pairs) >= MIN_TOKENS else diagnose_metrics(run.history, facts)


def diagnose_tokens(pairs: TokenPairs, facts: Facts) -> Diagnosis | NoFinding:
    """Diagnose a mismatch from the tokens of a run.

    Args:
        pairs: At least MIN_TOKENS tokens of the run.
        facts: Facts from its settings, metrics and events.
    """
    diff = np.clip(pairs.diff, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    size, k3_kl = float(np.abs(diff).mean()), float((np.expm1(diff) - diff).mean())
    summary = f"{size:.2g} nats on average over {len(pairs)} tokens, k3 KL {k3_kl:.2g}"
    proof = failed_proof(facts)
    if size <= EXACT and proof is None:
        text = f"engine and learner agree: {summary}; float32 explains up to {EXACT:g}"
        return NoFinding(kind="mismatch", state="right", text=text)
    contrasts = [contrast for contrast in (by_position(pairs), by_age(pairs), by_step(pairs)) if contrast]
    causes = _causes(pairs, facts, contrasts, size=size)
    names = {cause.name for cause in causes}
    if proof is not None:
        causes = [proof, *(cause for cause in causes if cause.name not in REPLACED_BY_PROOF)]
    elif (names == {"stale_rollouts"} and k3_kl <= STALE_KL) or (names == {"precision"} and not facts.is_exact):
        reason = causes[0].title.partition(":")[0]
        text = f"engine and learner differ by {summary}: {reason} explains it"
        return NoFinding(kind="mismatch", state="right", text=text)
    up = f"{100.0 * _upward_share(diff):.3g} % of the difference is upward: there the learner's logprob is higher"
    rows = [(summary, size), *((contrast.text, contrast.affected) for contrast in contrasts), (up, None)]
    evidence = tuple(Evidence(metric="rollouts.jsonl", text=text, value=value) for text, value in rows)
    return Diagnosis(kind="mismatch", what=APART, evidence=evidence, causes=tuple(causes))


REPLACED_BY_PROOF = ("stale_weights", "precision", "other_computation")
"""Causes that a failed weight proof explains better."""


def _causes(pairs: TokenPairs, facts: Facts, contrasts: list[Contrast], *, size: float) -> list[Cause]:
    """Return the causes that the tokens show, largest share first."""
    certain = [contrast for contrast in contrasts if contrast.is_certain]
    causes = [with_evidence(contrast.name, contrast.text, share=contrast.share) for contrast in certain]
    is_usual = np.logical_and.reduce([np.ones(len(pairs), dtype=bool), *(contrast.usual for contrast in certain)])
    unaffected = pairs.diff[is_usual] if is_usual.any() else pairs.diff
    up, unaffected_size = _upward_share(unaffected), float(np.abs(unaffected).mean())
    ratios = np.exp(np.clip(unaffected, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    kept, error = float(ratios.mean()), float(ratios.std()) / math.sqrt(len(ratios))
    if up <= ONE_SIDED and unaffected_size > EXACT and 1.0 - kept > CERTAIN * error:
        texts = [
            f"the learner assigns {100.0 * kept:.3g} % of its mass to what the engine can sample; without truncation "
            "it is 100 %",
            ", ".join(facts.cuts) or "the recorded settings do not truncate: look at the engine's own defaults",
        ]
        share = min((1.0 - 2.0 * up) * unaffected_size / size, 1.0)
        causes.append(with_evidence("truncation", *texts, share=share))
    if causes:
        by_share = sorted(causes, key=lambda cause: cause.share or 0.0)
        return list({cause.name: cause for cause in by_share}.values())[::-1]
    if size <= ROUNDED and not (facts.is_exact and size > 10.0 * EXACT):
        return [with_evidence("precision", f"{size:.2g} nats with the {facts.dtypes}")]
    youngest, first = int(pairs.staleness.min()), int(pairs.step.min())
    if youngest >= 1:
        return [with_evidence("stale_rollouts", f"every token was sampled by weights at least {youngest} versions old")]
    since = "from the first step on" if first <= 1 else f"from step {first} on, the first recorded one"
    text = f"{size:.2g} nats are more than rounding explains ({facts.dtypes}), and no other cause shows"
    return [with_evidence("other_computation", f"{text}; present {since}", *facts.suspects)]


def by_position(pairs: TokenPairs) -> Contrast | None:
    """Contrast the first tokens of responses with those far from the prompt."""
    edge = int(np.clip((np.median(pairs.position) + 1) // 2, 1, FIRST_TOKENS))
    first = f"at the first {edge} tokens" if edge > 1 else "at the first token"
    groups = (f"at token {edge + 1} and later", first)
    return _contrast("template", pairs, pairs.position >= edge, pairs.position < edge, groups)


def by_age(pairs: TokenPairs) -> Contrast | None:
    """Contrast the tokens of the newest weights with older ones.

    The cause is stale weights instead of stale rollouts if the engine's version stands still while the learner's moves.
    """
    fresh = _newest(pairs)
    known = pairs.staleness[pairs.staleness >= 0]
    if not len(known):
        return None
    late = pairs.step >= np.median(pairs.step)
    is_stuck = len(np.unique(pairs.version[late])) == 1 and len(np.unique(pairs.policy_version[late])) >= 3
    newest = int(pairs.staleness[fresh].max())
    groups = (f"of weights up to {newest} versions old", f"up to {int(known.max())}")
    old = (pairs.staleness >= 0) & ~fresh
    return _contrast("stale_weights" if is_stuck else "stale_rollouts", pairs, fresh, old, groups)


def by_step(pairs: TokenPairs) -> Contrast | None:
    """Contrast the first steps with later ones, among tokens of the same reported age."""
    fresh = _newest(pairs)
    steps = np.sort(pairs.step[fresh])
    last = steps[min(MIN_TOKENS, len(steps)) - 1]
    groups = (f"up to step {last}", f"up to step {steps[-1]}")
    return _contrast("stale_weights", pairs, fresh & (pairs.step <= last), fresh & (pairs.step > last), groups)


def _newest(pairs: TokenPairs) -> Bools:
    """Return tokens of the lowest staleness, and the next if too few; all tokens if versions are unknown."""
    known = np.sort(pairs.staleness[pairs.staleness >= 0])
    if not len(known):
        return np.ones(len(pairs), dtype=bool)
    newest: Bools = (pairs.staleness >= 0) & (pairs.staleness <= known[min(MIN_TOKENS, len(known)) - 1])
    return newest


def _contrast(name: str, pairs: TokenPairs, usual: Bools, affected: Bools, groups: tuple[str, str]) -> Contrast | None:
    """Contrast two groups of tokens with these names; None if one is empty."""
    size = np.abs(pairs.diff)
    if not usual.any() or not affected.any():
        return None
    before, after = float(size[usual].mean()), float(size[affected].mean())
    is_enough = bool(min(usual.sum(), affected.sum()) >= MIN_TOKENS)
    excess = max(after - before, 0.0) * float(affected.mean())
    return Contrast(
        name=name,
        usual=usual,
        affected=after,
        share=min(excess / max(float(size.mean()), 1e-12), 1.0),
        is_certain=is_enough and after > EXACT and grows(size[usual], size[affected]),
        text=f"{before:.2g} nats {groups[0]}, {after:.2g} {groups[1]}",
    )


def _upward_share(diff: FloatColumn) -> float:
    """Return the share of the absolute difference in tokens that are more likely to the learner than to the engine."""
    total = float(np.abs(diff).sum())
    return float(np.maximum(diff, 0.0).sum()) / total if total else 0.5
