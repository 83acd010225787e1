"""The table of a run's stability."""

import numpy as np
from made_up_metrics import healthy, history

from rl_metrics.health import judge
from rl_metrics.health.stability import stability


def rows_of(values, **options):
    verdict = judge(history(values), **options)
    return {row.metric: row for row in stability(history(values), verdict, **options)}


def test_means_and_newest_values_beside_their_ranges():
    rows = rows_of(healthy() | {"actor/grad_norm": np.array([2.0] * 59 + [0.5])})
    norm = rows["actor/grad_norm"]
    assert (norm.mean, norm.last, norm.step) == (1.975, 0.5, 60)
    assert norm.to_json() | {"label": ""} == {
        "label": "",
        "metric": "actor/grad_norm",
        "mean": 1.975,
        "last": 0.5,
        "step": 60,
        "healthy_mean": "at most 0.8",
        "healthy_last": "at most 1",
        "source": "evaluation guide",
        "mark": "accepted",
        "why": "the reward has risen by 40.8 % of the possible gain, from 0.6057",
        "rules": ["grad_norm"],
    }
    assert rows["actor/ppo_kl"].mark == "ok"
    assert "actor/kl_loss" not in rows


def test_what_is_outside_with_a_finding_says_so():
    flat = {"critic/score/mean": np.full(60, 0.5)}
    assert rows_of(healthy() | flat | {"actor/grad_norm": np.full(60, 2.0)})["actor/grad_norm"].mark == "outside"


def test_what_is_outside_without_a_reason_is_not_accepted():
    few = {name: values[:12] for name, values in healthy().items()} | {"actor/pg_loss": np.full(12, 0.08)}
    loss = rows_of(few | {"critic/advantages/mean": np.zeros(12)})["actor/pg_loss"]
    assert (loss.mark, loss.why) == ("outside", "no check warns about it yet")  # the mean is judged after 20 steps
    late = rows_of(healthy() | {"actor/entropy": np.array([0.3] * 59 + [0.6])})["actor/entropy"]
    assert (late.mark, late.why) == ("outside", "no check warns about it yet")


def test_a_mark_that_is_unknown_says_why():
    row = rows_of(healthy() | {"actor/ppo_kl": np.zeros(60)})["actor/ppo_kl"]
    assert row.why.startswith("actor/ppo_kl is 0: with one update a batch every ratio is 1")
    few = {name: values[:12] for name, values in healthy().items()}
    assert rows_of(few)["actor/grad_norm"].why == "12 of the 20 steps needed"
    assert rows_of(healthy(), family="distillation")["actor/entropy"].why == "the ranges are for a policy gradient"


def test_a_kl_that_cannot_move_and_a_distillation_have_no_mark():
    assert rows_of(healthy() | {"actor/ppo_kl": np.zeros(60)})["actor/ppo_kl"].mark == "unknown"
    rows = rows_of(healthy(), family="distillation")
    assert {row.mark for row in rows.values()} == {"unknown"}
    assert {row.healthy_last for row in rows.values()} == {""}
