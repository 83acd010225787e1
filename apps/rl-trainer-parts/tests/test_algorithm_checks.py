"""Refused values of `[algorithm]` and `[correction]`, with their messages."""

from pathlib import Path
from typing import Any

import pytest

from rl_core import InProcessQueue
from rl_core.errors import SettingsError
from rl_distill.objectives.registry import ADVANTAGES, POLICY_LOSSES
from rl_distill.objectives.rejection import REJECTION_CRITERIA
from rl_trainer_parts.checks.all_checks import check_values
from rl_trainer_parts.learning.objective import gdpo_components, make_kl_control, make_objective, make_selection
from rl_trainer_parts.rollouts.setup import queue_tasks
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings

RECOMPUTE = {"algorithm.old_logprobs": "recompute"}
ADVANTAGES_THAT_NEED_MORE = {
    "optimal_token_baseline": 'so it needs algorithm.old_logprobs = "recompute"; found "rollout".',
    "gdpo": "needs algorithm.weights = {NAME = 1.0, ...}",
}


def settings_with(changes: dict[str, Any]) -> Settings:
    values: dict[str, dict[str, Any]] = {
        "policy": {"path": Path("p")},
        "prompts": {"train": Path("t")},
        "reward": {"function": "exact_match"},
    }
    for name, value in changes.items():
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value
    return build_settings(values)


def problems(changes: dict[str, Any]) -> list[str]:
    try:
        check_values(settings_with(changes))
    except SettingsError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_advantages_are_taken_or_name_what_they_need(name: str) -> None:
    found = problems({"algorithm.advantage": name})
    if name in ADVANTAGES_THAT_NEED_MORE:
        (line,) = found
        assert ADVANTAGES_THAT_NEED_MORE[name] in line
    else:
        assert found == []


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("algorithm.policy_loss", "vanilla", "Did you mean 'ppo_clip', verl's 'vanilla'?"),
        (
            "algorithm.advantage",
            "tir_optimal_token_baseline",
            "Did you mean 'optimal_token_baseline', verl's 'tir_optimal_token_baseline'?",
        ),
        ("algorithm.kl_estimator", "low_var_kl", "Did you mean 'k3', verl's 'low_var_kl'?"),
        ("dynamic_sampling.filter", "true", "Did you mean 'reward_spread', verl's 'true'?"),
        ("rollout.engine", "sglang", "verl's 'sglang' is missing here."),
        ("algorithm.aggregation", "token-meen", "Did you mean 'token-mean'?"),
    ],
)
def test_values_of_verl_lead_to_ours(name: str, value: str, hint: str) -> None:
    (line,) = problems({name: value})
    assert line.endswith(f". {hint}")


def test_gdpo_with_named_components() -> None:
    changes = {"algorithm.advantage": "gdpo", "algorithm.weights": {"style": 1.0, "acc": 2.0}}
    assert problems(changes) == []
    assert gdpo_components(settings_with(changes)) == ["acc", "style"]
    assert gdpo_components(settings_with({})) == []
    InProcessQueue(queue_tasks(settings_with(changes), order="issue")).close()


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_policy_losses_are_taken_and_select_by_covariance(name: str) -> None:
    assert problems({"algorithm.policy_loss": name}) == []
    assert (make_selection(settings_with({"algorithm.policy_loss": name})) is not None) == name.endswith("_cov")


@pytest.mark.parametrize("name", REJECTION_CRITERIA.names())
def test_rejection_criteria_are_taken_with_recomputed_logprobs(name: str) -> None:
    assert problems({**RECOMPUTE, "correction.reject": {name: 1.5}}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.advantage": "reinforce_plus_plus", "rollout.group_size": 1},
        {"algorithm.eps": 1e-4},
        {"algorithm.advantage": "remax", "rollout.group_size": 1, "dynamic_sampling.filter": "reward_spread"},
        {**RECOMPUTE, "algorithm.advantage": "optimal_token_baseline", "correction.weights": "token"},
        {"algorithm.advantage": "maxrl", "algorithm.policy_loss": "dro", "algorithm.aggregation": "token-sum"},
        {"algorithm.dual_clip": float("inf"), "algorithm.clip_high": 0.28},
        {"algorithm.kl_coefficient": 0.1, "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"},
        {"algorithm.kl_coefficient": 0.1, "algorithm.kl_estimator": "k3+", "algorithm.kl_target": 0.01},
        {**RECOMPUTE, "correction.weights": "token", "correction.floor": 0.5},
        {**RECOMPUTE, "correction.reject": {"token_k1": (0.5, 2.0), "seq_mean_k3": 0.01}},
    ],
)
def test_combinations_that_work(changes: dict[str, Any]) -> None:
    assert problems(changes) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"algorithm.advantage": "dr_grpo", "rollout.group_size": 1},
            "algorithm.advantage = 'dr_grpo' compares the sessions of a prompt, so rollout.group_size must be at "
            "least 2; found 1.",
        ),
        (
            {
                "algorithm.advantage": "remax",
                "rollout_cache.enabled": True,
                "rollout_cache.directory": "cache",
                "rollout_cache.rewards": "again",
            },
            'rollout_cache.rewards = "again" cannot score the greedy sessions of algorithm.advantage = "remax" again: '
            'of these, only the reward is stored. Set rollout_cache.rewards = "stored".',
        ),
        (
            {"algorithm.gamma": 0.9},
            "algorithm.gamma is an option of advantage gae, advantage reinforce_plus_plus, which this run does not "
            "use. Choose it, or leave it out.",
        ),
        (
            {"algorithm.advantage": "reinforce_plus_plus", "algorithm.gamma": 2},
            "algorithm.gamma must be at most 1; found 2.",
        ),
        ({"algorithm.eps": "small"}, "algorithm.eps: must be number; found 'small'. "),
        ({"algorithm.dual_clip": 1.0}, "algorithm.dual_clip must be above 1; found 1."),
        (
            {"algorithm.policy_loss_options": {"dual_clip": 2.0}},
            "algorithm.policy_loss_options is gone, because each option is a setting of its own. Write "
            "algorithm.OPTION.",
        ),
        (
            {"algorithm.name": "maxrl", "algorithm.kl_in": "reward", "algorithm.kl_coefficient": 0.1},
            'algorithm.advantage = "maxrl" needs rewards of at least 0, so algorithm.kl_in must be "loss".',
        ),
        (
            {"algorithm.name": "grop"},
            "algorithm.name = 'grop' is not known; known: cispo, clip_cov, dapo, dppo, dr_grpo, dro, gdpo, gmpo, gpg, "
            "grpo, grpo_passk, gspo, kl_cov, lite_ppo, maxrl, opo, otb, ppo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, remax, rloo, sapo. Did you mean 'grpo'?",
        ),
        (
            {"algorithm.policy_loss": "sapo", "algorithm.clip_low": 0.2},
            "algorithm.policy_loss = 'sapo': unknown option of policy loss 'sapo': 'clip_low'. Known: tau_negative, "
            "tau_positive.",
        ),
        (
            {"algorithm.clip_low": 1.5},
            "algorithm.policy_loss = 'ppo_clip': clip_low of policy loss 'ppo_clip' must be a number of at "
            "least 0 and below 1; found 1.5 (float).",
        ),
        (
            {"algorithm.kl_in": "reward"},
            'algorithm.kl_in = "reward" needs algorithm.kl_coefficient above 0 as its initial value; found 0.',
        ),
        (
            {"algorithm.kl_target": 0.01},
            "algorithm.kl_target needs algorithm.kl_coefficient above 0 as its initial value; found 0.",
        ),
        (
            {"algorithm.kl_in": "reward", "algorithm.kl_coefficient": 0.1, "algorithm.kl_estimator": "k3+"},
            "algorithm.kl_estimator = 'k3+' has its own gradient, which algorithm.kl_in = \"reward\" does not "
            "use. Set 'k3'.",
        ),
        (
            {"correction.weights": "sequence"},
            "correction.weights = 'sequence' compares the learner's logprobs with the engine's, so it needs "
            'algorithm.old_logprobs = "recompute"; found "rollout".',
        ),
        (
            {"correction.reject": {"token_k3": 0.1}},
            "correction.reject = {'token_k3': 0.1} compares the learner's logprobs with the engine's, so it needs "
            'algorithm.old_logprobs = "recompute"; found "rollout".',
        ),
        (
            {**RECOMPUTE, "correction.weights": "token", "correction.floor": 3.0},
            "correction.floor must be above 0 and at most correction.cap = 2; found 3.",
        ),
        (
            {**RECOMPUTE, "correction.reject": {"token_k3": (0.1, 0.2)}},
            "correction.reject, token_k3: the bound of a k2 or k3 criterion must be one number above 0; found "
            "(0.1, 0.2).",
        ),
    ],
)
def test_impossible_combinations_are_refused(changes: dict[str, Any], says: str) -> None:
    assert problems(changes) == [says]


def test_an_unknown_criterion_gets_the_known_ones() -> None:
    (line,) = problems({**RECOMPUTE, "correction.reject": {"token_k4": 1.0}})
    assert line.startswith("correction.reject = 'token_k4' is not known; known: seq_max_k2, ")
    assert "Did you mean 'token_k" in line


def test_the_kl_is_in_one_place() -> None:
    changes = {"algorithm.kl_coefficient": 0.1, "algorithm.kl_estimator": "k1"}
    assert make_objective(settings_with(changes)).options.kl_coefficient == 0.1
    assert make_objective(settings_with({**changes, "algorithm.kl_in": "reward"})).options.kl_coefficient == 0.0
    control = make_kl_control(settings_with({**changes, "algorithm.kl_target": 0.01, "algorithm.kl_horizon": 5}))
    assert (control.coefficient, control.target, control.horizon) == (0.1, 0.01, 5)
