"""Causes of a mismatch: what a run's settings and events say about them, limits, titles and advice."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rl_metrics.doctor.diagnosis import Cause
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.history import FloatColumn
from rl_metrics.run_files.json_lines import number_or_none
from rl_metrics.run_files.run_record import RunRecord

MOST_UNKNOWN = 0.01
"""Maximum share of tokens without the engine's experts at which routing cannot explain a mismatch."""
FLOAT32 = ("float32", "fp32", "float64")
CANARY_EXACT = 1e-3
"""Maximum difference of a proof's canary in float32, in nats; the proof's own bound."""
CANARY_ROUNDED = 0.3
"""The same in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a run.

    Attributes:
        engine_dtype: Dtype of the engine's computation; None if unknown.
        learner_dtype: Dtype of the learner's computation; None if unknown.
        cuts: Settings that truncate the sampling distribution, such as "rollout.top_p = 0.9".
        suspects: Further settings that may explain a mismatch, in words.
        failed_proofs: Why the engine does not have the learner's weights, in words: failed weight proofs, or a proof's
            canary that differs.
    """

    engine_dtype: str | None = None
    learner_dtype: str | None = None
    cuts: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    failed_proofs: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether both sides are known to compute in float32."""
        return self.engine_dtype in FLOAT32 and self.learner_dtype in FLOAT32

    @property
    def dtypes(self) -> str:
        """Both dtypes, in words."""
        engine, learner = self.engine_dtype or "an unknown dtype", self.learner_dtype or "an unknown one"
        return f"engine in {engine}, learner in {learner}"


def facts_of(run: RunRecord) -> Facts:
    """Return the facts about a run; settings of another shape are ignored."""
    names = ("rollout", "vllm", "optimizer", "parallel")
    tables = [run.settings.get(name) for name in names]
    rollout, vllm, optimizer, parallel = (table if isinstance(table, dict) else {} for table in tables)
    dtypes = [dtype[:40] if isinstance(dtype := table.get("dtype"), str) else None for table in (vllm, optimizer)]
    sampling = {name: number_or_none(rollout.get(name)) for name in ("top_p", "top_k", "min_p", "temperature")}
    cuts = [
        f"rollout.{name} = {sampling[name]:g}"
        for name, is_off in (("top_p", 1.0), ("top_k", 0.0), ("min_p", 0.0))
        if sampling[name] not in (None, is_off, -1)
    ]
    suspects = []
    if sampling["temperature"] not in (None, 1.0):
        suspects.append(f"rollout.temperature is {sampling['temperature']:g}: engine and learner must both apply it")
    unknown = run.history.finite("router/unknown_share")
    is_mixture = len(unknown) or (number_or_none(parallel.get("expert")) or 0) > 1
    if is_mixture and not (len(unknown) and unknown.max() <= MOST_UNKNOWN):
        suspects.append("the policy is a mixture, and the learner does not replay the engine's experts")
    facts = Facts(engine_dtype=dtypes[0], learner_dtype=dtypes[1], cuts=tuple(cuts), suspects=tuple(suspects))
    return replace(facts, failed_proofs=tuple(_failed_proofs(run, is_exact=facts.is_exact)))


def _failed_proofs(run: RunRecord, *, is_exact: bool) -> Iterator[str]:
    errors = [
        str(event.get("error", ""))[:500]
        for event in run.events
        if event["event"] == "weight_proof_failed" or "WeightProofError" in str(event.get("error", ""))
    ]
    if errors:
        yield f"the proof of a weight update failed {len(errors)} times{': ' * bool(errors[-1])}{errors[-1]}"
    bound = CANARY_EXACT if is_exact else CANARY_ROUNDED
    largest = float(run.history.finite("weights/canary_max_diff").max(initial=0.0))
    if largest > bound:
        yield f"weights/canary_max_diff reached {largest:.2g} nats; up to {bound:g} is normal"


EXACT = 1e-3
"""Mean absolute difference, in nats, that two float32 implementations explain.

They differ by about 1e-5, and a weight proof accepts 1e-3.
"""

ROUNDED = 0.03
"""The same if one side computes in bfloat16.

With eight bits, logits from 8 to 16 have steps of 1/16, so a logit is off by 0.016 on average, and a sum over layers by
a few times that.
"""

STALE_KL = 0.05
"""Maximum k3 KL, in nats, that is expected of rollouts known to be old; PPO's clip at 0.2 starts to bind around it."""

GROWTH = 3.0
"""A difference grows if it reaches this multiple of its first value; noise of 30 tokens stays below 2."""

TYPICAL = 1.5
"""The median must grow by this multiple too, because a few tokens of other experts change a mean, but no median."""

CERTAIN = 4.0
"""Standard errors between two means that rule out chance: one run in 30,000 exceeds them by chance."""

APART = "Engine and learner assign different probabilities to the same tokens."

CAUSES = {
    "stale_weights": (
        "stale weights: the engine serves older weights than it reports",
        (
            "restart the engines, and resume from the last checkpoint",
            "look at weights.transport, at the proof's canary (trainer.canary_prompts) and at the engine's log",
        ),
    ),
    "stale_rollouts": (
        "stale rollouts: the learner has moved on since they were generated",
        (
            "lower schedule.max_staleness, schedule.sync_every or the learning rate",
            'correct it: correction.weights = "token", algorithm.old_logprobs = "recompute"',
        ),
    ),
    "template": (
        "template: engine and learner see different prompts",
        (
            "compare both sides' token ids of one prompt: chat template, BOS token, trailing space, system prompt",
            "give the engine token ids instead of text",
        ),
    ),
    "truncation": (
        "sampling truncation: the engine samples from a part of the distribution (top-p, top-k, min-p)",
        (
            "set rollout.top_p = 1 and leave rollout.top_k out, or score tokens among those that the engine kept",
            "look at the engine's own defaults, such as the model's generation_config.json",
        ),
    ),
    "precision": (
        "precision: engine and learner round differently",
        (
            "use the same dtype for vllm.dtype and optimizer.dtype; float16 or float32 if bfloat16 is too coarse",
            'correct it: correction.weights = "token"',
        ),
    ),
    "other_computation": (
        "another computation: the engine's weights or layers differ from the learner's",
        (
            "compare both sides' logprobs of one sequence, layer by layer",
            "look for quantization, tensors that were not loaded, different rotary or attention settings, and a "
            "temperature that only one side applies",
            "for a mixture of experts, let the learner replay the engine's experts: vllm.capture_experts = true",
        ),
    ),
}
"""Title and advice by name."""


def with_evidence(name: str, *texts: str, share: float | None = None, metric: str = "rollouts.jsonl") -> Cause:
    """Return a cause with its evidence."""
    title, advice = CAUSES[name]
    evidence = tuple(Evidence(metric=metric, text=text) for text in texts)
    return Cause(name=name, title=title, share=share, evidence=evidence, advice=advice)


def failed_proof(facts: Facts) -> Cause | None:
    """Return stale weights as a cause if a weight proof failed or its canary differs, else None."""
    if not facts.failed_proofs:
        return None
    return with_evidence("stale_weights", *facts.failed_proofs, metric="weights/canary_max_diff")


def grows(first: FloatColumn, later: FloatColumn) -> bool:
    """Return whether differences grow by GROWTH, and beyond chance."""
    error = math.hypot(first.std() / math.sqrt(len(first)), later.std() / math.sqrt(len(later)))
    is_certain = later.mean() - first.mean() >= CERTAIN * error and np.median(later) > TYPICAL * np.median(first)
    return bool(is_certain and later.mean() >= GROWTH * max(first.mean(), 1e-5))
