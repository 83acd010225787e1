"""Titles and advice for the causes of a mismatch."""

from rl_metrics.doctor.diagnosis import Cause
from rl_metrics.doctor.facts import Facts
from rl_metrics.doctor.limits import CANARY_EXACT, CANARY_ROUNDED
from rl_metrics.health.finding import Evidence

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
    texts = []
    if facts.proof_failures:
        said = f": {facts.proof_error}" if facts.proof_error else ""
        texts.append(f"the proof of a weight update failed {facts.proof_failures} times{said}")
    bound = CANARY_EXACT if facts.is_exact else CANARY_ROUNDED
    if facts.canary is not None and facts.canary > bound:
        texts.append(f"weights/canary_max_diff reached {facts.canary:.2g} nats; up to {bound:g} is normal")
    return with_evidence("stale_weights", *texts, metric="weights/canary_max_diff") if texts else None
