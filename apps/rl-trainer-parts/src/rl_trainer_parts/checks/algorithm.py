"""Checks of `[algorithm]` and `[correction]` that run before models load."""

from collections.abc import Iterable, Iterator

from rl_core.registry import nearest_name
from rl_distill import ALGORITHMS
from rl_distill.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    REJECTION_CRITERIA,
    SESSION_RULES,
    rejection_limits,
    try_advantage,
)
from rl_trainer_parts.learning.objective import (
    gdpo_components,
    has_policy_gradient,
    learns_from_rewards,
    make_policy_objective,
    needs_energy,
    needs_greedy,
)
from rl_trainer_parts.settings.algorithm_choice import options_of
from rl_trainer_parts.settings.fields import problems_of
from rl_trainer_parts.settings.other_names import value_hint
from rl_trainer_parts.settings.schema import Settings

Named = tuple[str, str, list[str]]
"""A setting, its value, and the allowed values."""

WITHIN_GROUPS = (
    *("grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline"),
    *("lite_ppo", "maxrl", "optimal_token_baseline"),
)
"""Advantages that compare the sessions of a prompt."""


def algorithm_names(settings: Settings) -> list[Named]:
    """Settings that select a component by name."""
    algorithm = settings.algorithm
    return [
        *([("algorithm.name", algorithm.name, ALGORITHMS.names())] if algorithm.name is not None else []),
        ("algorithm.advantage", algorithm.advantage, ADVANTAGES.names()),
        ("algorithm.session_rule", algorithm.session_rule, SESSION_RULES.names()),
        ("algorithm.policy_loss", algorithm.policy_loss, POLICY_LOSSES.names()),
        ("algorithm.aggregation", algorithm.aggregation, AGGREGATIONS.names()),
        ("algorithm.kl_estimator", algorithm.kl_estimator, KL_ESTIMATORS.names()),
        *(("correction.reject", name, REJECTION_CRITERIA.names()) for name in settings.correction.reject),
    ]


def unknown_names(named: Iterable[Named]) -> Iterator[str]:
    """Problems of unknown names."""
    for name, found, known in named:
        if found not in known:
            hint = value_hint(name, found) or nearest_name(found, known)
            yield f"{name} = {found!r} is not known; known: {', '.join(sorted(known))}.{hint}"


def algorithm_problems(settings: Settings) -> Iterator[str]:
    """Problems of options and combinations whose names are known."""
    if learns_from_rewards(settings):
        yield from _advantage(settings)
    elif settings.algorithm.name is not None:
        yield (
            f"algorithm.name = {settings.algorithm.name!r} learns from rewards, so it needs "
            "distillation.use_task_rewards = true. Set this, or leave the name out."
        )
    yield from (*_policy_loss(settings), *_kl(settings), *_correction(settings))


def _advantage(settings: Settings) -> Iterator[str]:
    algorithm = settings.algorithm
    if algorithm.advantage in WITHIN_GROUPS and settings.rollout.group_size == 1:
        yield (
            f"algorithm.advantage = {algorithm.advantage!r} compares the sessions of a prompt, so rollout.group_size "
            "must be at least 2; found 1."
        )
    if needs_energy(settings) and algorithm.old_logprobs != "recompute":
        yield (
            'algorithm.advantage = "optimal_token_baseline" weighs tokens by the learner\'s probabilities before the '
            'update, so it needs algorithm.old_logprobs = "recompute"; found "rollout".'
        )
    if needs_greedy(settings) and settings.rollout_cache.enabled and settings.rollout_cache.rewards == "again":
        yield (
            'rollout_cache.rewards = "again" cannot score the greedy sessions of algorithm.advantage = "remax" again: '
            'of these, only the reward is stored. Set rollout_cache.rewards = "stored".'
        )
    if algorithm.advantage == "maxrl" and algorithm.kl_in == "reward" and algorithm.kl_coefficient:
        yield 'algorithm.advantage = "maxrl" needs rewards of at least 0, so algorithm.kl_in must be "loss".'
    if algorithm.advantage == "gdpo" and not gdpo_components(settings):
        yield (
            'algorithm.advantage = "gdpo" needs algorithm.weights = {NAME = 1.0, ...} with the components that '
            "the reward function returns; found none."
        )
    elif algorithm.advantage in ADVANTAGES.names():
        options = options_of(algorithm, "advantage")
        yield from problems_of("algorithm: ", try_advantage, algorithm.advantage, options)


def _policy_loss(settings: Settings) -> Iterator[str]:
    algorithm = settings.algorithm
    if algorithm.policy_loss not in POLICY_LOSSES.names() or algorithm.kl_estimator not in KL_ESTIMATORS.names():
        return  # reported by another check
    yield from problems_of(f"algorithm.policy_loss = {algorithm.policy_loss!r}: ", make_policy_objective, settings)


PER_RESPONSE = {"gspo": "arXiv:2507.18071", "geo_mean": "arXiv:2507.20673"}
"""Policy losses of whole responses, whose papers average over responses, with the paper."""


def aggregation_notes(settings: Settings) -> Iterator[str]:
    """Notes about a loss of whole responses whose average weights responses by their length."""
    algorithm = settings.algorithm
    paper = PER_RESPONSE.get(algorithm.policy_loss)
    if paper is not None and has_policy_gradient(settings) and algorithm.aggregation != "seq-mean-token-mean":
        yield (
            f"algorithm.policy_loss = {algorithm.policy_loss!r} is a loss of responses, but algorithm.aggregation "
            f'= "{algorithm.aggregation}" weights longer responses more; the paper ({paper}) averages over responses: '
            '"seq-mean-token-mean"'
        )


def _kl(settings: Settings) -> Iterator[str]:
    algorithm = settings.algorithm
    if not algorithm.kl_coefficient:
        for name, is_set in (('kl_in = "reward"', algorithm.kl_in == "reward"), ("kl_target", algorithm.kl_target)):
            if is_set:
                yield f"algorithm.{name} needs algorithm.kl_coefficient above 0 as its initial value; found 0."
        return
    if algorithm.kl_in == "reward" and algorithm.kl_estimator.endswith("+"):
        yield (
            f"algorithm.kl_estimator = {algorithm.kl_estimator!r} has its own gradient, which algorithm.kl_in = "
            f'"reward" does not use. Set {algorithm.kl_estimator.rstrip("+")!r}.'
        )


def _correction(settings: Settings) -> Iterator[str]:
    correction = settings.correction
    for name, is_set in (("weights", correction.weights != "none"), ("reject", bool(correction.reject))):
        if is_set and settings.algorithm.old_logprobs != "recompute":
            yield (
                f"correction.{name} = {getattr(correction, name)!r} compares the learner's logprobs with the engine's, "
                'so it needs algorithm.old_logprobs = "recompute"; found "rollout".'
            )
    if correction.floor is not None and not 0 < correction.floor <= correction.cap:
        yield (
            f"correction.floor must be above 0 and at most correction.cap = {correction.cap:g}; found "
            f"{correction.floor:g}."
        )
    for name, bound in correction.reject.items():
        if name in REJECTION_CRITERIA.names():
            is_signed = REJECTION_CRITERIA.get(name).is_signed
            yield from problems_of(f"correction.reject, {name}: ", rejection_limits, bound, is_signed=is_signed)
