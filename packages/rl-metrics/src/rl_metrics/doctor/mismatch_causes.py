"""Limits of the diagnosis of a mismatch, with reasons, and titles and advice for its causes."""

import math

import numpy as np

from rl_metrics.doctor.diagnosis import Cause
from rl_metrics.doctor.facts import Facts
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.history import FloatColumn

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
            "set rollout.top_p = 1 and leave rollout.top_k out",
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
    return (
        with_evidence("stale_weights", *facts.failed_proofs, metric="weights/canary_max_diff")
        if facts.failed_proofs
        else None
    )


def grows(first: FloatColumn, later: FloatColumn) -> bool:
    """Return whether differences grow by GROWTH, and beyond chance."""
    error = math.hypot(first.std() / math.sqrt(len(first)), later.std() / math.sqrt(len(later)))
    is_certain = later.mean() - first.mean() >= CERTAIN * error and np.median(later) > TYPICAL * np.median(first)
    return bool(is_certain and later.mean() >= GROWTH * max(first.mean(), 1e-5))
