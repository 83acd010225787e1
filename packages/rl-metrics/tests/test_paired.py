"""Two policies on the same prompts, against all sign flips one by one, and how often equal policies seem different."""

import itertools
import math

import numpy as np
import pytest

from rl_metrics.validation import ValidationResponses, paired, paired_differences


def responses(scores, *, name="reward", source="set"):
    """Return responses from the scores of each prompt."""
    rows = [(str(prompt), score) for prompt, of_prompt in enumerate(scores) for score in of_prompt]
    uids, values = zip(*rows, strict=True)
    return ValidationResponses(uids=uids, sources=[source] * len(uids), variables={name: values})


def compare(a, b, **options):
    return paired_differences({"set": responses(a)}, {"set": responses(b)}, **options)["set"]


def oracle(a, b):
    """Return p and the interval: the differences on a fine grid that all sign flips, one by one, do not reject."""
    differences = np.array([np.mean(second) - np.mean(first) for first, second in zip(a, b, strict=True)])
    signs = np.array(list(itertools.product((-1, 1), repeat=len(differences))))

    def p(true):
        flipped = np.abs(signs @ (differences - true))
        return np.mean(flipped >= abs(np.sum(differences - true)) - 1e-9)

    grid = np.linspace(-2.0, 2.0, 4001)
    kept = [true for true in grid if p(true) >= 0.05]
    return p(0.0), kept[0], kept[-1]


@pytest.mark.parametrize("num_prompts", [6, 9])
def test_p_and_interval_are_those_of_all_sign_flips(num_prompts):
    generator = np.random.default_rng(num_prompts)
    a, b = generator.integers(0, 5, size=(2, num_prompts, 1)) / 4
    found, (p, low, high) = compare(a, b), oracle(a, b)
    assert (found.num_prompts, found.a, found.b) == (num_prompts, pytest.approx(a.mean()), pytest.approx(b.mean()))
    assert found.p == p
    assert (found.low, found.high) == (pytest.approx(low, abs=2e-3), pytest.approx(high, abs=2e-3))


@pytest.mark.parametrize("gain", [0.0, 0.08, 0.16])
def test_many_prompts_have_the_interval_and_p_of_a_t_test(gain):
    generator = np.random.default_rng(3)
    chances = generator.uniform(size=150)
    a = (generator.uniform(size=(150, 4)) < chances[:, None]).astype(float)
    b = (generator.uniform(size=(150, 4)) < chances[:, None] + gain).astype(float)
    found = compare(a, b, num_draws=40_000)
    differences = b.mean(axis=1) - a.mean(axis=1)
    mean, error = differences.mean(), differences.std(ddof=1) / np.sqrt(150)
    assert (found.low, found.high) == (
        pytest.approx(mean - 1.976 * error, abs=4e-3),
        pytest.approx(mean + 1.976 * error, abs=4e-3),
    )
    assert found.p == pytest.approx(math.erfc(abs(mean) / error / math.sqrt(2)), abs=0.05)  # differences have steps


def test_exact_and_drawn_flips_agree(monkeypatch):
    generator = np.random.default_rng(1)
    a, b = generator.normal([[[0.0]], [[0.6]]], size=(2, 12, 1))
    exact = compare(a, b)
    monkeypatch.setattr(paired, "MAX_EXACT", 11)
    drawn = compare(a, b, num_draws=100_000)
    assert drawn.p == pytest.approx(exact.p, abs=3e-3)
    assert (drawn.low, drawn.high) == (pytest.approx(exact.low, abs=0.01), pytest.approx(exact.high, abs=0.01))
    certain = compare([[0.0]] * 80, [[1.0]] * 80, num_draws=99)
    assert certain.p == 0.01, "the observed flip counts, so p is never 0"
    assert compare([[0.0]] * 80, [[1.0]] * 80).p == 1 / 10_001


def test_the_observed_flip_counts_whatever_the_true_difference_is():
    lows, highs = paired._flip_ranges(np.linspace(0.5, 2.0, 20), num_draws=9)
    assert len(lows) == 10
    assert (lows[0], highs[0]) == (-math.inf, math.inf)
    assert np.isfinite([lows[1:], highs[1:]]).all()


def test_a_few_equal_differences_are_not_certain():
    assert compare([[0.0]] * 3, [[1.0]] * 3).p == 0.25  # the sign test's: both sides of 1/8
    assert compare([[0.0]] * 10, [[1.0]] * 10).p == 2**-9
    assert compare([[0.5]] * 9, [[0.5]] * 9).p == 1.0
    assert compare([[0.0]], [[1.0]]).p == 1.0


@pytest.mark.parametrize("num_prompts", [8, 12])
@pytest.mark.parametrize("kind", ["normal", "four responses", "one response"])
def test_equal_policies_are_rarely_called_different(num_prompts, kind):
    generator = np.random.default_rng(num_prompts)
    chances = generator.uniform(size=(400, 1, num_prompts))
    size = (400, 2, num_prompts)
    draws = {
        "normal": lambda: generator.normal(size=size),
        "four responses": lambda: generator.binomial(4, chances, size=size) / 4,
        "one response": lambda: generator.binomial(1, chances, size=size).astype(float),
    }[kind]()
    found = [compare(a[:, None], b[:, None], num_draws=500) for a, b in draws]
    assert np.mean([one.p < 0.05 for one in found]) <= 0.065
    assert [one.p < 0.05 for one in found] == [not one.low <= 0.0 <= one.high for one in found]


def test_an_interval_of_few_prompts_has_no_ends():
    found = compare([[0.0]] * 5, [[1.0]] * 5)
    assert (found.p, found.low, found.high) == (2**-4, -math.inf, math.inf)
    found = compare([[0.0]] * 6, [[1.0]] * 6)
    assert (found.p, found.low, found.high) == (2**-5, 1.0, 1.0)


def test_pairs_see_what_two_intervals_hide():
    hard = np.linspace(0, 1, 50)
    found = compare(hard[:, None], np.minimum(hard + 0.02, 1.0)[:, None])
    assert found.low > 0.0
    assert found.p < 0.001


def test_swapped_policies_give_the_opposite():
    a, b = [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]] * 5, [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]] * 5
    one, other = compare(a, b), compare(b, a)
    assert (one.a, one.b, one.p) == (other.b, other.a, pytest.approx(other.p, abs=0.01))
    assert one.low == pytest.approx(-other.high, abs=0.05)


def test_a_prompt_without_a_score_of_both_is_left_out():
    nan = float("nan")
    found = compare([[1.0], [nan], [0.0, nan]], [[0.0], [1.0], [1.0, 1.0]])
    assert (found.num_prompts, found.a, found.b) == (2, 0.5, 0.5)


def test_a_set_without_a_common_score_is_left_out_and_not_counted():
    lost, first, second = responses([[float("nan")]]), responses([[0.0]] * 8), responses([[1.0]] * 8)
    found = paired_differences({"lost": lost, "set": first}, {"lost": second, "set": second})
    assert found.keys() == {"set"}
    assert found["set"].p_holm == found["set"].p == 2**-7


def test_the_variable_is_one_that_both_have():
    judged = ValidationResponses(uids=["0"], sources=["set"], variables={"acc": [1.0], "reward": [0.25]})
    found = paired_differences({"set": judged}, {"set": responses([[0.5]])})["set"]
    assert (found.a, found.b) == (0.25, 0.5)
    found = paired_differences({"set": judged}, {"set": judged})["set"]
    assert (found.a, found.b) == (1.0, 1.0)


def test_one_uid_in_two_sources_is_two_prompts():
    both = ValidationResponses(uids=["0", "0"], sources=["x", "y"], variables={"reward": [0.0, 1.0]})
    assert paired_differences({"set": both}, {"set": both})["set"].num_prompts == 2


def test_p_values_of_several_sets_are_adjusted_as_holm_does():
    sizes = {"a": 8, "b": 6, "c": 7, "d": 2}
    first = {name: responses([[0.0]] * size) for name, size in sizes.items()}
    second = {name: responses([[1.0]] * size) for name, size in sizes.items()}
    found = paired_differences(first, second)
    assert {name: one.p for name, one in found.items()} == {"a": 2**-7, "b": 2**-5, "c": 2**-6, "d": 0.5}
    # By hand: 4/128; 3/64; 2/32; 1/2.
    adjusted = {"a": 4 / 128, "b": 2 / 32, "c": 3 / 64, "d": 0.5}
    assert {name: one.p_holm for name, one in found.items()} == adjusted
    equal = paired_differences({"a": first["a"], "b": first["b"]}, {"a": first["a"], "b": second["b"]})
    assert (equal["a"].p_holm, equal["b"].p_holm) == (1.0, 2 / 32)


def test_an_adjusted_p_value_is_never_below_one_of_a_smaller_p_value():
    first, second = ({name: responses([[score]] * 8) for name in "ab"} for score in (0.0, 1.0))
    assert [one.p_holm for one in paired_differences(first, second).values()] == [2 / 128, 2 / 128]
