"""Titles and advice for the causes of a mismatch."""

from collections.abc import Iterable
from dataclasses import replace

from rl_metrics.doctor.diagnosis import Cause
from rl_metrics.health.finding import Evidence

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
    "temperature": (
        "temperature: engine and learner divide their logits by different temperatures",
        (
            "let the learner use rollout.temperature, or set it to 1",
            "check whether the engine's logprobs are computed before or after its temperature",
        ),
    ),
    "routing": (
        "routing: a few tokens go to different experts in engine and learner",
        (
            'let the learner replay the engine\'s experts: rollout.engine = "vllm", engine.capture_experts = true, '
            'policy.learner = "megatron"',
            "reject the tokens: correction.reject",
        ),
    ),
    "precision": (
        "precision: engine and learner round differently",
        (
            "use the same dtype for engine.dtype and learner.dtype; float16 or float32 if bfloat16 is too coarse",
            'correct it: correction.weights = "token"',
        ),
    ),
    "other_computation": (
        "another computation: the engine's weights or layers differ from the learner's",
        (
            "compare both sides' logprobs of one sequence, layer by layer",
            "look for quantization, tensors that were not loaded, and different rotary or attention settings",
        ),
    ),
}
"""Title and advice by name."""


def with_evidence(name: str, *texts: str, share: float | None = None, metric: str = "rollouts.jsonl") -> Cause:
    """Return a cause with its evidence."""
    title, advice = CAUSES[name]
    evidence = tuple(Evidence(metric=metric, text=text) for text in texts)
    return Cause(name=name, title=title, share=share, evidence=evidence, advice=advice)


def merged(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return each cause once, in order of first appearance, with all its evidence and the sum of its shares."""
    found: dict[str, Cause] = {}
    for cause in causes:
        same = found.setdefault(cause.name, cause)
        if same is not cause:
            shares = [one.share for one in (same, cause) if one.share is not None]
            evidence = tuple(dict.fromkeys((*same.evidence, *cause.evidence)))
            found[cause.name] = replace(same, share=sum(shares) if shares else None, evidence=evidence)
    return tuple(found.values())
