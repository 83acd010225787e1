import tracemalloc

import numpy as np
import pytest

from rl_metrics.validation import estimators
from rl_metrics.validation.estimators import bootstrap_means, mean_intervals

NAN = float("nan")


def intervals(*columns, **options):
    return mean_intervals(np.stack([np.asarray(column, float) for column in columns], 1), **options)


def test_intervals_agree_with_the_normal_approximation():
    values = np.random.default_rng(0).normal(2.0, 3.0, size=400)
    low, high = intervals(values, num_draws=4000)[:, 0]
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.05)
    assert high == pytest.approx(values.mean() + half, abs=0.05)


def test_covers_the_true_mean_as_often_as_it_says():
    generator = np.random.default_rng(1)
    columns = [generator.random(60) < 0.3 for _ in range(300)]
    low, high = intervals(*columns, num_draws=400)
    assert 0.89 <= ((low <= 0.3) & (high >= 0.3)).mean() <= 0.99


def test_a_lower_level_is_narrower():
    values = np.arange(50.0)
    wide, narrow = intervals(values), intervals(values, level=0.5)
    assert wide[0, 0] < narrow[0, 0] < 24.5 < narrow[1, 0] < wide[1, 0]


def test_prompts_that_do_not_count_change_only_how_many_are_drawn():
    few = np.array([0.0, 1.0, 0.0, 1.0, NAN, NAN])
    all_equal = np.array([3.0, 3.0, 3.0, 3.0, NAN, 3.0])
    found = intervals(few, all_equal)
    assert 0.0 <= found[0, 0] < 0.5 < found[1, 0] <= 1.0
    assert found[:, 1].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("column", [[1.0, NAN, NAN], [NAN] * 3, [1.0, 2.0, np.inf], [-np.inf, np.inf, 1.0]])
def test_one_prompt_or_an_infinite_value_has_no_interval(column):
    found = intervals(column, [1.0, 2.0, 3.0])
    assert np.isnan(found[:, 0]).all()
    assert 1.0 <= found[0, 1] < 2.0 < found[1, 1] <= 3.0
    assert np.isnan(intervals(column)).all()


def test_the_seed_decides_the_draws():
    values = np.random.default_rng(0).random(40)
    assert intervals(values, seed=7).tolist() == intervals(values, seed=7).tolist()
    assert intervals(values, seed=7).tolist() != intervals(values, seed=2**64 - 1).tolist()


def test_intervals_are_of_95_percent_of_1000_draws_with_seed_0():
    values = np.random.default_rng(0).random(40)
    assert intervals(values).tolist() == intervals(values, level=0.95, num_draws=1000, seed=0).tolist()


def test_draws_in_parts_have_their_number_and_their_law(monkeypatch):
    values = np.random.default_rng(0).normal(size=(50, 1))
    monkeypatch.setattr(estimators, "CHUNK", 50 * 300)
    means = bootstrap_means(values, num_draws=1000)
    assert means.shape == (1000, 1)
    assert len(np.unique(means)) == 1000
    assert means.std() == pytest.approx(values.std() / 50**0.5, rel=0.1)


def test_a_draw_has_a_mean_if_any_drawn_prompt_counts():
    means = bootstrap_means(np.array([[2.0], [NAN]]), num_draws=2000)
    assert set(means[~np.isnan(means)]) == {2.0}
    assert np.isnan(means).mean() == pytest.approx(1 / 4, abs=0.05)


def test_last_bits_do_not_change_the_draws():
    values = np.repeat([0.1, 0.7, 0.9, 1 / 3, 0.0], 20)
    noise = 1e-16 * np.random.default_rng(0).normal(size=100)
    np.testing.assert_allclose(intervals(values + noise), intervals(values), rtol=1e-12)


def test_memory_is_bounded():
    values = np.random.default_rng(0).random(100_000)
    tracemalloc.start()
    intervals(values, num_draws=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20  # all draws at once would take 80 MB for each of three arrays


@pytest.mark.parametrize("num_prompts", [40, 4000])
def test_many_prompts_alike_are_drawn_by_their_kinds_with_the_same_law(num_prompts):
    kinds = np.array([0.0, 1.0, 3.0, np.nan])
    values = np.repeat(kinds, num_prompts // 4)[:, None]
    apart = values + np.linspace(0.0, 1e-9, num_prompts)[:, None]  # each prompt has a kind of its own
    together, alone = (mean_intervals(column, num_draws=20_000) for column in (values, apart))
    error = np.nanstd(kinds) / np.sqrt(0.75 * num_prompts)
    assert np.abs(together - alone).max() < 0.05 * error
