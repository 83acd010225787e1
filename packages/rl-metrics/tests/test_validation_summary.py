import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import ShapeError
from rl_metrics.table import DEFINITIONS
from rl_metrics.validation import ValidationResponses, headline, response_table, summarize_validation

GOLDEN = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parents[3] / "tests" / "golden"))
NAN = float("nan")


def summarize(uids, sources, **variables):
    return summarize_validation(ValidationResponses(uids=uids, sources=sources, variables=variables))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("source", ["a", "b"])
def test_golden_values(seed, source):
    path = GOLDEN / f"objectives_{seed}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is in the checkout only")
    golden = np.load(path, allow_pickle=False)
    metrics = summarize(
        golden["validation_uid"].tolist(),
        golden["validation_source"].tolist(),
        reward=golden["validation_reward"],
    )
    for section, metric in (("val-core", "mean@8"), ("val-aux", "std@8")):
        expected = float(golden[f"validation/{source}/reward/{metric}"])
        assert metrics[f"{section}/{source}/reward/{metric}"] == pytest.approx(expected, rel=1e-10)


def test_hand_computed():
    metrics = summarize(
        ["p", "q", "p", "q", "r"],
        ["gsm8k", "gsm8k", "gsm8k", "gsm8k", "math"],
        acc=[1.0, 0.0, 0.0, 0.0, 1.0],
        reward=[2.0, 0.0, 4.0, 2.0, 3.0],
    )
    assert metrics == {
        "val-aux/gsm8k/num_prompts": 2.0,
        "val-aux/gsm8k/num_responses": 4.0,
        "val-core/gsm8k/acc/mean@2": 0.25,
        "val-aux/gsm8k/acc/std@2": 0.25,
        "val-aux/gsm8k/reward/mean@2": 2.0,
        "val-aux/gsm8k/reward/std@2": 1.0,
        "val-aux/math/num_prompts": 1.0,
        "val-aux/math/num_responses": 1.0,
        "val-core/math/acc/mean@1": 1.0,
        "val-aux/math/reward/mean@1": 3.0,
    }
    for name in metrics:
        DEFINITIONS.lookup(name)


def test_the_main_variable_is_chosen_for_each_source():
    metrics = summarize(["p", "q"], ["a", "b"], acc=[1.0, NAN], reward=[0.5, 0.25])
    assert metrics["val-core/a/acc/mean@1"] == 1.0
    assert metrics["val-aux/a/reward/mean@1"] == 0.5
    assert metrics["val-core/b/reward/mean@1"] == 0.25
    assert not any(name.startswith("val-aux/b/acc") for name in metrics)


def test_without_acc_and_reward_nothing_is_core():
    metrics = summarize(["p"], ["a"], length=[7.0])
    assert metrics["val-aux/a/length/mean@1"] == 7.0
    assert headline(metrics) is None


def test_prompts_with_different_numbers_of_responses_count_once_each():
    metrics = summarize(["p", "p", "p", "p", "q"], ["a"] * 5, acc=[1.0, 1.0, 1.0, 1.0, 0.0])
    assert metrics["val-core/a/acc/mean@4"] == 0.5
    assert metrics["val-aux/a/acc/std@4"] == 0.0


def test_a_missing_value_is_counted_and_is_no_zero():
    metrics = summarize(["p", "p", "q"], ["a"] * 3, acc=[1.0, NAN, 0.0])
    assert metrics["val-core/a/acc/mean@1"] == 0.5
    assert metrics["val-aux/a/acc/num_missing"] == 1.0
    assert metrics["val-aux/a/num_responses"] == 3.0


def test_one_uid_in_two_sources_is_two_prompts():
    metrics = summarize(["p", "p"], ["a", "b"], acc=[1.0, 0.0])
    assert metrics["val-core/a/acc/mean@1"] == 1.0
    assert metrics["val-core/b/acc/mean@1"] == 0.0


def test_nothing_to_validate():
    assert summarize([], []) == {}
    assert summarize([], [], acc=[]) == {}


def test_lengths_are_checked():
    with pytest.raises(ShapeError, match=r"acc must have uids' shape \[2\]; found \[1\]"):
        summarize(["p", "q"], ["a", "a"], acc=[1.0])
    with pytest.raises(ShapeError, match=r"sources must have uids' shape \[2\]; found \[1\]"):
        summarize(["p", "q"], ["a"])


def test_the_headline_is_the_mean_over_sources():
    metrics = summarize(["p", "q"], ["a", "b"], acc=[1.0, 0.5], reward=[9.0, 9.0])
    assert headline(metrics) == 0.75


def test_an_estimator_of_ones_own():
    responses = ValidationResponses(uids=["p", "p"], sources=["a", "a"], variables={"acc": [0.0, 1.0]})
    metrics = summarize_validation(
        responses, estimators=[lambda table: {f"best@{table.max_count}": float(np.nanmax(table.values, axis=1).mean())}]
    )
    assert metrics["val-aux/a/acc/best@2"] == 1.0


def test_a_response_table_keeps_the_order_of_each_prompt():
    table = response_table([1.0, 2.0, NAN, 3.0, 4.0], prompt_of=[7, 3, 7, 7, 3])
    np.testing.assert_array_equal(table.values, [[2.0, 4.0], [1.0, 3.0]])
    assert table.counts.tolist() == [2, 2]
    long = response_table(np.arange(10_000.0), prompt_of=np.arange(10_000) % 3)
    np.testing.assert_array_equal(long.values[1], np.append(np.arange(1.0, 10_000.0, 3), np.nan))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(-1e3, 1e3)), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
def test_agrees_with_a_loop_in_any_order(rows, random):
    random.shuffle(rows)
    metrics = summarize([f"u{u}" for u, _, _ in rows], [f"s{s}" for _, s, _ in rows], reward=[v for _, _, v in rows])
    for source in {s for _, s, _ in rows}:
        by_uid = {}
        for uid, of, value in rows:
            if of == source:
                by_uid.setdefault(uid, []).append(value)
        n = max(len(values) for values in by_uid.values())
        expected = np.mean([np.mean(values) for values in by_uid.values()])
        assert metrics[f"val-core/s{source}/reward/mean@{n}"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
        stds = [np.std(values) for values in by_uid.values() if len(values) > 1]
        if stds:
            assert metrics[f"val-aux/s{source}/reward/std@{n}"] == pytest.approx(np.mean(stds), rel=1e-6, abs=1e-6)


def test_a_hundred_thousand_responses_are_quick():
    count = 100_000
    values = np.arange(count) % 7 / 7
    uids = [f"u{i // 8}" for i in range(count)]
    began = time.perf_counter()
    metrics = summarize(uids, [f"s{i // 8 % 4}" for i in range(count)], acc=values, reward=values)
    assert time.perf_counter() - began < 5.0
    assert metrics["val-aux/s0/num_responses"] == count / 4
