"""The objective, as lines of the plan."""

from collections.abc import Iterator

from rl_trainer_parts.learning.distillation import has_policy_gradient, learns_from_rewards
from rl_trainer_parts.learning.objective import clip_range
from rl_trainer_parts.settings.schema import Settings


def describe_objective(settings: Settings) -> Iterator[str]:
    """Lines about advantage, policy loss, clip range, aggregation, KL and correction."""
    algorithm, correction = settings.algorithm, settings.correction
    yield "Objective"
    if has_policy_gradient(settings):
        source = f"advantage {algorithm.advantage}" if learns_from_rewards(settings) else "advantages from the teachers"
        low, high = clip_range(settings)
        clip = "" if low is None and high is None else f", clip {_number(low)} below and {_number(high)} above"
        yield f"  policy     {source}; loss {algorithm.policy_loss}{clip}"
        yield f"{' ' * 13}against the logprobs of the {_sampled(settings)}"
    yield f"  average    {algorithm.aggregation}"
    if algorithm.kl_coefficient:
        target = "" if algorithm.kl_target is None else f", adapted to {algorithm.kl_target:g} nats a token"
        kind = f"{algorithm.kl_estimator} in the {algorithm.kl_in}"
        yield f"  KL         {kind}, coefficient {algorithm.kl_coefficient:g}{target}"
    else:
        yield "  KL         none"
    if algorithm.entropy_coefficient:
        yield f"  entropy    bonus with coefficient {algorithm.entropy_coefficient:g}"
    if correction.weights != "none":
        yield f"  correction weights per {correction.weights}, at most {correction.cap:g}"
    if correction.reject:
        yield f"  rejection  by {', '.join(correction.reject)}"


def _sampled(settings: Settings) -> str:
    return "engine" if settings.algorithm.old_logprobs == "rollout" else "learner before the update"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
