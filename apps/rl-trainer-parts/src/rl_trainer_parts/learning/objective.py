"""Settings become what the learner minimises."""

from rl_distill.objectives import (
    AdaptiveKL,
    DistillationObjective,
    PolicyObjective,
    PolicyObjectiveOptions,
    SampledLogprobs,
    TokenSelection,
    bound_policy_loss,
    distillation_objective,
    policy_objective,
)
from rl_trainer_parts.learning.distillation import objective_options
from rl_trainer_parts.settings.schema import Settings


def make_objective(settings: Settings) -> PolicyObjective | DistillationObjective:
    """What the learner minimises: the policy's objective, that of teachers, or both.

    Raises:
        SettingsError: An option is unknown or impossible.
    """
    if not settings.distillation.is_on or settings.distillation.used_as == "reward":
        return make_policy_objective(settings)
    policy = make_policy_objective(settings) if settings.distillation.use_task_rewards else None
    return distillation_objective(objective_options(settings), policy)


def make_policy_objective(settings: Settings) -> PolicyObjective:
    """The policy objective of the settings.

    Raises:
        SettingsError: An option is unknown or impossible.
    """
    algorithm = settings.algorithm
    return policy_objective(
        PolicyObjectiveOptions(
            old_logprobs=sampled_logprobs(settings),
            policy_loss=algorithm.policy_loss,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            policy_loss_options=algorithm.policy_loss_options,
            kl_coefficient=algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0,
            kl_estimator=algorithm.kl_estimator,
            entropy_coefficient=algorithm.entropy_coefficient,
        )
    )


def make_selection(settings: Settings) -> TokenSelection | None:
    """What chooses the tokens that the policy loss treats apart; None where it treats all alike."""
    return bound_policy_loss(make_policy_objective(settings).options).select


def sampled_logprobs(settings: Settings) -> SampledLogprobs:
    """Column of the ratio's denominator."""
    return "old_logprobs" if settings.algorithm.old_logprobs == "recompute" else "rollout_logprobs"


def make_kl_control(settings: Settings) -> AdaptiveKL:
    """The KL's coefficient at the start of a run.

    Raises:
        SettingsError: The target or the horizon is impossible.
    """
    algorithm = settings.algorithm
    return AdaptiveKL(coefficient=algorithm.kl_coefficient, target=algorithm.kl_target, horizon=algorithm.kl_horizon)


def gdpo_components(settings: Settings) -> list[str]:
    """Components of the reward that travel with the rows, because the advantage compares them."""
    weights = settings.algorithm.advantage_options.get("weights")
    return sorted(weights) if settings.algorithm.advantage == "gdpo" and isinstance(weights, dict) else []
