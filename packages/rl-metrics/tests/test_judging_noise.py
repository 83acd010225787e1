"""Verdicts on noisy, slow or unusual runs: no false alarms, and no missed faults."""

import numpy as np
import pytest
from made_up_metrics import history

from rl_metrics.health import judge


def found(steps, **metrics):
    values = {name.replace("__", "/"): np.broadcast_to(np.asarray(of, float), steps) for name, of in metrics.items()}
    return [finding.rule for finding in judge(history(values)).findings]


def rewards(random, steps, *, prompts=16, group=8, solved=0.2):
    """Return mean rewards of steps whose prompts have different difficulties."""
    difficulty = random.beta(2 * solved, 2 * (1 - solved), (steps, prompts))
    return random.binomial(group, difficulty).mean(axis=1) / group


# -- rewards


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("prompts", [8, 16, 64])
def test_noise_is_no_gain_that_could_be_lost(seed, prompts):
    scores = rewards(np.random.default_rng([seed, prompts]), 400, prompts=prompts)
    at = [
        steps
        for steps in (10, 20, 50, 100, 200, 400)
        if "reward_fell" in found(steps, critic__score__mean=scores[:steps])
    ]
    assert at == []


@pytest.mark.parametrize("seed", range(10))
def test_a_fall_is_found_through_the_noise(seed):
    random = np.random.default_rng(seed)
    scores = np.concatenate([rewards(random, 60, solved=0.5), rewards(random, 15, solved=0.1)])
    assert "reward_fell" in found(75, critic__score__mean=scores, critic__score__max=1)


@pytest.mark.parametrize("reward", [-1.0, 0.1, 1.0])
def test_a_reward_that_is_the_same_for_everything_is_not_the_best_there_is(reward):
    same = {"critic__score__mean": reward, "critic__score__max": reward, "critic__score__min": reward}
    rules = found(
        60, **same, critic__advantages__max=0, critic__advantages__min=0, rollout__groups_without_spread_ratio=1
    )
    assert {"no_advantages", "without_spread", "reward_flat"} <= {*rules}


@pytest.mark.parametrize(("mean", "is_solved"), [(-0.2, False), (-0.101, True)])
def test_what_is_the_best_where_rewards_are_penalties(mean, is_solved):
    scores = np.concatenate([np.full(10, -1.0), np.full(50, mean)])
    rules = found(60, critic__score__mean=scores, critic__score__max=-0.1, rollout__groups_without_spread_ratio=0.99)
    assert ("without_spread" in rules) is not is_solved


# -- logs without the highest reward, as from TRL


def test_a_log_without_the_highest_reward_is_judged_by_the_start():
    flat, solved = 0.2 + np.random.default_rng(0).normal(0, 0.01, 100), 1 - 0.7 * np.exp(-np.arange(100) / 10)
    kl, entropy = np.linspace(0, 1, 100), 0.45 * np.exp(-np.arange(100) / 8)
    assert "reference_kl_high" in found(100, critic__score__mean=flat, actor__reference_kl=kl)
    assert "policy_held" in found(100, critic__score__mean=flat, actor__reference_kl=3e-4)
    assert "entropy_collapse" in found(100, critic__score__mean=flat, actor__entropy=entropy)
    assert found(100, critic__score__mean=solved, actor__reference_kl=kl, actor__entropy=entropy + 0.01) == []


def test_what_cannot_be_compared_is_not_said_to_have_risen():
    verdict = judge(history({"actor/reference_kl": np.full(60, 1.0)}))
    [check] = [check for check in verdict.checks if check.rule == "reference_kl_high"]
    assert check.reading.endswith("which is accepted: the run does not record critic/score/mean or critic/rewards/mean")


# -- slow policies


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("warm_up", [1, 50])
def test_a_policy_that_moves_slowly_is_not_held(seed, warm_up):
    random, steps = np.random.default_rng(seed), np.arange(1, 301)
    rate = 1e-6 * np.minimum(steps / warm_up, 1)
    moved = np.cumsum(rate) / 1e-6 / 300
    scores, kl = 0.3 + 0.4 * moved + random.normal(0, 0.03, 300), 0.02 * moved * np.exp(random.normal(0, 0.2, 300))
    for n in range(15, 120, 15):
        rules = found(
            n, critic__score__mean=scores[:n], critic__score__max=1, actor__kl_loss=kl[:n], actor__lr=rate[:n]
        )
        assert "policy_held" not in rules, n


# -- memory


@pytest.mark.parametrize(("gib_a_step", "steps"), [(0.2, (50, 100, 200, 400)), (0.03, (500, 2000))])
def test_a_leak_stays_a_leak_however_large_the_process_has_become(gib_a_step, steps):
    memory = 20 + gib_a_step * np.arange(2000) + np.random.default_rng(0).normal(0, 0.05, 2000)
    assert [n for n in steps if found(n, perf__process_memory_gb=memory[:n]) != ["memory"]] == []


def test_memory_that_settles_late_is_no_leak():
    memory = 20 + 5 * (1 - np.exp(-np.arange(2000) / 100)) + np.random.default_rng(0).normal(0, 0.05, 2000)
    assert [
        n for n in (50, 80, 100, 150, 200, 300, 500, 1000, 2000) if found(n, perf__process_memory_gb=memory[:n])
    ] == []


# -- the first cause


def test_a_policy_that_is_not_finite_explains_what_follows():
    is_broken = np.arange(1, 101) > 30
    gone = np.where(is_broken, np.nan, 0.4)
    values = {
        "critic/score/mean": np.where(is_broken, 0.0, 0.3),
        "actor/loss": gone,
        "actor/grad_norm": gone,
        "response_length/clip_ratio": np.where(is_broken, 1.0, 0.02),
    }
    findings = {finding.rule: finding for finding in judge(history(values)).findings}
    assert next(iter(findings)) == "lost_metrics"
    assert findings["truncated"].causes[0] == findings["reward_fell"].causes[0] == "the policy is no longer finite"


def test_stale_weights_explain_a_reward_that_never_rose():
    random = np.random.default_rng(0)
    scores, kl = 0.2 + random.normal(0, 0.01, 200), 0.01 + 0.003 * np.arange(200)
    values = {"critic__score__mean": scores, "critic__score__max": 1, "rollout_corr__k3_kl": kl}
    assert found(200, training__staleness__mean=1.5, **values) == ["off_policy", "reward_flat"]


# -- validation and training


def validated(training, validation, problems=None, every=2):
    """Return the findings of a run; with `problems`, its validation has intervals for that many problems."""
    column = np.full(len(training), np.nan)
    column[every - 1 :: every] = validation
    values = {"critic/score/mean": np.asarray(training), "val-core/x/reward/mean@1": column}
    if problems:
        half = 1.96 * np.sqrt(column * (1 - column) / problems)
        values |= {"val-core/x/reward/mean@1/ci_high": column + half, "val-core/x/reward/mean@1/ci_low": column - half}
    return [finding.rule for finding in judge(history(values)).findings]


def test_greedy_validation_of_few_problems_is_no_overfitting():
    assert validated(np.linspace(0.3, 0.7, 8), [0.1, 0.15, 0.2, 0.25], problems=40) == []


@pytest.mark.parametrize("greedy", [0.05, 0.45])
def test_a_gap_of_sampling_that_stays_is_no_overfitting(greedy):
    training = np.linspace(0.3, 0.8, 40)
    assert validated(training, np.linspace(greedy, 0.8 + (greedy - 0.3), 20).clip(0, 0.95), problems=1000) == []


@pytest.mark.parametrize("problems", [None, 500])
def test_training_that_leaves_validation_behind_is_overfitting(problems):
    training = np.linspace(0.3, 0.95, 40) + np.random.default_rng(0).normal(0, 0.02, 40)
    plateau = np.minimum(np.linspace(0.4, 1.0, 20), 0.55)
    assert validated(training, plateau, problems=problems) == ["overfitting"]


def test_a_validation_of_few_problems_does_not_fall_by_chance():
    training, validation = np.linspace(0.3, 0.4, 12), [0.3, 0.4, 0.35, 0.3, 0.31, 0.3]
    assert validated(training, validation, problems=40) == []
    assert "validation_fell" in validated(training, validation, problems=2000)


def test_a_validation_that_is_worse_for_some_steps_and_recovers_has_not_fallen():
    """As in distillation by forward KL: greedy answers get worse until the student has learned the scratchpad."""
    validation = [0.39, 0.34, 0.09, 0.11, 0.23, 0.44, 0.62, 0.65, 0.69, 0.75]
    assert [
        n for n in range(1, 11) if validated(np.linspace(0.3, 0.5, 20)[: 2 * n], validation[:n], problems=500)
    ] == []
    assert "validation_fell" in validated(np.linspace(0.3, 0.5, 12), [*validation[:4], 0.1, 0.1], problems=500)
