"""What a run learns from, and the learner's objective, from the settings."""

from dataclasses import fields
from inspect import signature
from typing import Any

from rl_distill import ALGORITHMS
from rl_distill.objectives import (
    POLICY_LOSSES,
    AdaptiveKL,
    DistillationObjective,
    DistillationObjectiveOptions,
    PolicyObjective,
    PolicyObjectiveOptions,
    SampledLogprobs,
    TokenSelection,
    bound_policy_loss,
    policy_objective,
)
from rl_trainer_parts.settings.algorithm_choice import options_of
from rl_trainer_parts.settings.schema import Settings


def has_teachers(settings: Settings) -> bool:
    """True when the queue has a task for teachers."""
    return bool(settings.distillation.teachers)


def learns_from_rewards(settings: Settings) -> bool:
    """True when the policy learns from task rewards, with or without teachers."""
    return not settings.distillation.is_on or settings.distillation.use_task_rewards


def needs_greedy(settings: Settings) -> bool:
    """True when every prompt has one more, greedy session, whose reward is the baseline of its group (ReMax)."""
    return learns_from_rewards(settings) and settings.algorithm.advantage == "remax"


def needs_energy(settings: Settings) -> bool:
    """True when the advantage reads `sum_pi_squared`, which the learner computes before its update (OTB)."""
    return learns_from_rewards(settings) and settings.algorithm.advantage == "optimal_token_baseline"


def method_title(settings: Settings) -> str:
    """Name of the method, such as "GRPO"."""
    if learns_from_rewards(settings):
        name = settings.algorithm.name
        return ALGORITHMS.get(name).title if name else settings.algorithm.advantage.upper()
    if settings.distillation.self_teacher.model is not None:
        return "Self-distillation"
    return "Distillation" if has_teachers(settings) else "Imitation of texts"


def has_policy_gradient(settings: Settings) -> bool:
    """True when tokens have advantages, from tasks or from teachers used as a reward."""
    return learns_from_rewards(settings) or settings.distillation.used_as == "reward"


def objective_options(settings: Settings) -> DistillationObjectiveOptions:
    """The distillation objective.

    Raises:
        SettingsError: An option is impossible.
    """
    chosen = settings.distillation
    names = (option.name for option in fields(DistillationObjectiveOptions) if option.name != "teachers")
    options: Any = {name: getattr(chosen, name) for name in names}
    return DistillationObjectiveOptions(**options, teachers=tuple(chosen.teachers))


def make_objective(settings: Settings, kl_coefficient: float | None = None) -> PolicyObjective | DistillationObjective:
    """The learner's objective: the policy's, the teachers', or their sum; see `make_policy_objective`."""
    if not settings.distillation.is_on or settings.distillation.used_as == "reward":
        return make_policy_objective(settings, kl_coefficient)
    policy = make_policy_objective(settings, kl_coefficient) if settings.distillation.use_task_rewards else None
    return DistillationObjective(objective_options(settings), policy)


def make_policy_objective(settings: Settings, kl_coefficient: float | None = None) -> PolicyObjective:
    """The policy objective.

    Args:
        settings: The run's settings.
        kl_coefficient: Current weight of a KL in the loss; None is that of the run's start.

    Raises:
        SettingsError: An option is unknown or impossible.
    """
    algorithm = settings.algorithm
    kl_coefficient = algorithm.kl_coefficient if kl_coefficient is None else kl_coefficient
    return policy_objective(
        PolicyObjectiveOptions(
            old_logprobs=sampled_logprobs(settings),
            policy_loss=algorithm.policy_loss,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            policy_loss_options=options_of(algorithm, "policy_loss"),
            kl_coefficient=kl_coefficient if algorithm.kl_in == "loss" else 0.0,
            kl_estimator=algorithm.kl_estimator,
            entropy_coefficient=algorithm.entropy_coefficient,
        )
    )


def clip_range(settings: Settings) -> tuple[float | None, float | None]:
    """Lower and upper clip range in effect; None where the loss has none."""
    algorithm = settings.algorithm
    known = signature(POLICY_LOSSES.get(algorithm.policy_loss)).parameters
    low, high = (known[name].default if name in known else None for name in ("clip_low", "clip_high"))
    return (
        low if algorithm.clip_low is None else algorithm.clip_low,
        high if algorithm.clip_high is None else algorithm.clip_high,
    )


def make_selection(settings: Settings) -> TokenSelection | None:
    """Selector of the tokens that the policy loss treats differently; None if it treats all alike."""
    return bound_policy_loss(make_policy_objective(settings).options).select


def sampled_logprobs(settings: Settings) -> SampledLogprobs:
    """Column with the denominator of the importance ratio."""
    return "old_logprobs" if settings.algorithm.old_logprobs == "recompute" else "rollout_logprobs"


def make_kl_control(settings: Settings) -> AdaptiveKL:
    """The KL coefficient at the start of a run.

    Raises:
        SettingsError: The target or the horizon is impossible.
    """
    algorithm = settings.algorithm
    return AdaptiveKL(coefficient=algorithm.kl_coefficient, target=algorithm.kl_target, horizon=algorithm.kl_horizon)


def gdpo_components(settings: Settings) -> list[str]:
    """Reward components that travel with the rows because the advantage compares them."""
    weights = getattr(settings.algorithm, "weights", None)
    return sorted(weights) if settings.algorithm.advantage == "gdpo" and weights else []
