import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_metrics.validation.estimators import (
    best_at_n,
    majority_at_n,
    mean_at_n,
    pass_at_k,
    std_at_n,
    subset_sizes,
    worst_at_n,
)
from rl_metrics.validation.responses import response_table

PROMPTS = st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=20), min_size=1, max_size=5)
PASSES = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=12), min_size=1, max_size=5)


def table_of(prompts, votes=None):
    flat = [value for values in prompts for value in values]
    rows = [row for row, values in enumerate(prompts) for _ in values]
    return response_table(flat, prompt_of=rows, votes=None if votes is None else [v for of in votes for v in of])


def drawn(values, count, reduce):
    """Return mean and standard deviation over all draws with replacement."""
    results = [reduce(draw) for draw in itertools.product(values, repeat=count)]
    return np.mean(results), np.std(results)


def test_sizes_are_powers_of_two_and_the_largest():
    assert [subset_sizes(n) for n in (1, 2, 3, 4, 8, 12)] == [[], [2], [2, 3], [2, 4], [2, 4, 8], [2, 4, 8, 12]]


@pytest.mark.parametrize("values", [[0.5], [1.0, 2.0], [3.0, 3.0, -1.0], [0.0, 5.0, 2.0, 2.0, 9.0]])
def test_best_and_worst_agree_with_all_draws(values):
    table = table_of([values])
    found = {**best_at_n(table), **worst_at_n(table)}
    assert len(found) == 4 * len(subset_sizes(len(values)))
    for size in subset_sizes(len(values)):
        for name, reduce in (("best", max), ("worst", min)):
            mean, std = drawn(values, size, reduce)
            assert found[f"{name}@{size}/mean"] == pytest.approx([mean])
            assert found[f"{name}@{size}/std"] == pytest.approx([std])


def test_majority_agrees_with_all_draws():
    # Values: "a" 0 or 2, "b" 5, no prediction 1. A draw is worth the first drawn value of the winner.
    values, votes = [0.0, 2.0, 5.0, 1.0], [0, 0, 1, -1]

    def outcomes(draw):
        counts = [sum(votes[i] == vote for i in draw) for vote in (0, 1)]
        winners = [vote for vote in (0, 1) if counts[vote] == max(counts)] if max(counts) else [-1]
        return [(values[next(i for i in draw if votes[i] == vote)], 1 / len(winners)) for vote in winners]

    found = majority_at_n(table_of([values], [votes]))
    for size in (2, 4):
        pairs = [pair for draw in itertools.product(range(4), repeat=size) for pair in outcomes(draw)]
        numbers, chances = np.array(pairs).T
        mean = (numbers * chances).sum() / 4**size
        assert found[f"maj@{size}/mean"] == pytest.approx([mean])
        assert found[f"maj@{size}/std"] == pytest.approx([math.sqrt(((numbers - mean) ** 2 * chances).sum() / 4**size)])


def test_a_clear_majority_is_better_than_the_mean():
    found = majority_at_n(table_of([[1.0] * 5 + [0.0] * 3], [[0] * 5 + [1, 2, 3]]))
    assert found["maj@8/mean"][0] > 0.9


def test_there_is_no_majority_without_predictions():
    assert majority_at_n(table_of([[1.0, 2.0]])) == {}
    assert majority_at_n(table_of([[1.0, 2.0]], [[-1, -1]])) == {}
    assert majority_at_n(table_of([[1.0]], [[0]])) == {}


def test_votes_of_more_than_256_are_left_out():
    table = table_of([[0.0] * 300], [[0] * 300])
    assert "maj@256/mean" in majority_at_n(table)
    assert "maj@300/mean" not in majority_at_n(table)
    assert "best@300/mean" in best_at_n(table)


def test_pass_at_k_hand_computed():
    found = pass_at_k(table_of([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0], [0.0]]))
    assert sorted(found) == ["pass@1", "pass@2", "pass@4"]
    np.testing.assert_allclose(found["pass@1"], [0.25, 1.0, 0.0])
    np.testing.assert_allclose(found["pass@2"], [0.5, 1.0, np.nan])
    np.testing.assert_allclose(found["pass@4"], [1.0, np.nan, np.nan])


@settings(max_examples=60, deadline=None)
@given(PASSES)
def test_pass_at_k_is_the_formula_of_chen(prompts):
    found = pass_at_k(table_of(prompts))
    for name, values in found.items():
        k = int(name.removeprefix("pass@"))
        for responses, value in zip(prompts, values, strict=True):
            n, c = len(responses), int(sum(responses))
            expected = np.nan if n < k else 1 - math.comb(n - c, k) / math.comb(n, k)
            assert value == pytest.approx(expected, abs=1e-12, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(PASSES)
def test_pass_at_1_is_the_mean_and_rises_with_k(prompts):
    table = table_of(prompts)
    found = pass_at_k(table)
    if table.max_count >= 2:
        np.testing.assert_allclose(found["pass@1"], next(iter(mean_at_n(table).values())), atol=1e-15)
    for few, more in itertools.pairwise(found.values()):
        assert (np.isnan(more) | (few <= more + 1e-12)).all()


@settings(max_examples=60, deadline=None)
@given(PASSES)
def test_best_never_says_more_than_pass_of_0_and_1(prompts):
    table = table_of(prompts)
    found, best = pass_at_k(table), best_at_n(table)
    for size in subset_sizes(table.max_count):
        of_best, of_pass = best[f"best@{size}/mean"], found[f"pass@{size}"]
        assert (np.isnan(of_best) | (of_best <= of_pass + 1e-12)).all()  # draws with replacement repeat responses


def test_pass_needs_a_threshold_where_values_are_not_0_and_1():
    table = table_of([[0.2, 0.9], [0.5, 0.1]])
    assert pass_at_k(table) == {}
    np.testing.assert_allclose(pass_at_k(table, threshold=0.5)["pass@1"], [0.5, 0.5])
    np.testing.assert_allclose(pass_at_k(table, threshold=0.5)["pass@2"], [1.0, 1.0])


@settings(max_examples=60, deadline=None)
@given(PROMPTS)
def test_best_rises_and_worst_falls_with_n_around_the_mean(prompts):
    table = table_of(prompts)
    mean = next(iter(mean_at_n(table).values()))
    for found, sign in ((best_at_n(table), 1), (worst_at_n(table), -1)):
        means = [mean, *(values for name, values in found.items() if name.endswith("/mean"))]
        for few, more in itertools.pairwise(means):
            assert (np.isnan(more) | (sign * few <= sign * more + 1e-9)).all()


@settings(max_examples=60, deadline=None)
@given(PROMPTS)
def test_worst_is_best_of_the_negatives(prompts):
    found = worst_at_n(table_of(prompts))
    mirrored = best_at_n(table_of([[-value for value in values] for values in prompts]))
    for name, values in mirrored.items():
        sign = -1 if name.endswith("/mean") else 1
        np.testing.assert_allclose(found[name.replace("best", "worst")], sign * values, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(PROMPTS)
def test_a_prompt_counts_where_it_has_as_many_responses(prompts):
    table = table_of(prompts)
    votes = table_of(prompts, [[0] * len(values) for values in prompts])
    for name, values in {**best_at_n(table), **worst_at_n(table), **majority_at_n(votes)}.items():
        size = int(name.split("@")[1].split("/")[0])
        assert np.isnan(values).tolist() == [len(responses) < size for responses in prompts]
    for values in std_at_n(table).values():
        assert np.isnan(values).tolist() == [len(responses) < 2 for responses in prompts]


def test_everything_of_equal_values_is_that_value():
    table = table_of([[0.7] * 8], [[0, 1, 2, -1, 0, 1, 1, 3]])
    for found in (mean_at_n(table), best_at_n(table), worst_at_n(table), majority_at_n(table)):
        for name, values in found.items():
            assert values == pytest.approx([0.0 if name.endswith("/std") else 0.7], abs=1e-12)
