"""Made-up runs for tests of verdicts: a healthy run, and changes to it."""

import numpy as np

from rl_metrics.health import judge
from rl_metrics.run_files.history import History

STEPS = 60


def noise(scale, *, seed=0, steps=STEPS):
    return np.random.default_rng(seed).normal(0.0, scale, steps)


def healthy(steps=STEPS):
    """Return the metrics of a run that learns: the reward rises from 0.55 to 0.85, the entropy falls to a third."""
    learnt = 1 - np.exp(-np.arange(steps) / 12)
    score = 0.55 + 0.3 * learnt + noise(0.015, steps=steps)
    return {
        "critic/score/mean": score,
        "critic/score/max": np.ones(steps),
        "critic/score/min": np.zeros(steps),
        "rollout/positive_reward_ratio": score,
        "rollout/groups_without_spread_ratio": 0.25 + 0.25 * learnt,
        "rollout/num_trajectories": np.full(steps, 512.0),
        "rollout/failed_sessions": np.zeros(steps),
        "critic/advantages/max": np.full(steps, 2.5),
        "critic/advantages/min": np.full(steps, -2.5),
        "critic/advantages/mean": 0.3 - 0.28 * learnt,
        "actor/entropy": 0.25 - 0.17 * learnt,
        "actor/pg_loss": -0.3 + 0.28 * learnt,
        "actor/ppo_kl": np.full(steps, 0.001),
        "actor/pg_clipfrac": np.full(steps, 0.01),
        "actor/grad_norm": 0.6 + noise(0.1, seed=1, steps=steps),
        "actor/skipped_updates": np.zeros(steps),
        "response_length/mean": 5.3 + 4 * learnt,
        "response_length/clip_ratio": np.zeros(steps),
        "training/staleness/mean": np.zeros(steps),
        "training/rollout_probs_diff_mean": np.full(steps, 1e-6),
        "training/rollout_actor_probs_pearson_corr": np.ones(steps),
        "rollout_corr/k3_kl": np.full(steps, 1e-6),
        "weights/canary_max_diff": np.full(steps, 1e-6),
        "timing_s/step": 1.5 + noise(0.15, seed=2, steps=steps),
        "timing_s/reward": np.full(steps, 0.001),
        "agent_loop/slowest/compute_score": np.full(steps, 0.0001),
        "perf/throughput": 5000 + noise(400, seed=3, steps=steps),
        "memory/trainer_gb": 1.2 + noise(0.01, seed=4, steps=steps),
        "memory/engine_gb": 0.8 + noise(0.01, seed=5, steps=steps),
        "fully_async/trainer/idle_ratio": np.full(steps, 0.05),
    }


def history(values, *, first_step=1):
    steps = len(next(iter(values.values())))
    return History(
        steps=np.arange(first_step, first_step + steps, dtype=np.int64), times=np.zeros(steps), values=values
    )


def verdict_of(steps=STEPS, **changed):
    values = healthy(steps) | {name.replace("__", "/"): np.asarray(column) for name, column in changed.items()}
    return judge(history(values))


NO_REWARD = {
    "critic/score/mean": np.zeros(STEPS),
    "critic/score/max": np.zeros(STEPS),
    "rollout/positive_reward_ratio": np.zeros(STEPS),
    "rollout/groups_without_spread_ratio": np.ones(STEPS),
    "critic/advantages/max": np.zeros(STEPS),
    "critic/advantages/min": np.zeros(STEPS),
}


def from_step(step, before, after, steps=STEPS):
    return np.where(np.arange(1, steps + 1) < step, before, after)
