"""Two policies on the same prompts, against a bootstrap written here and against all resamples."""

import itertools

import numpy as np
import pytest

from rl_core.errors import DataError
from rl_metrics.validation import ValidationResponses, paired_differences


def responses(scores, *, name="reward", source="set"):
    """Return responses from the scores of each prompt."""
    rows = [(str(prompt), score) for prompt, of_prompt in enumerate(scores) for score in of_prompt]
    uids, values = zip(*rows, strict=True)
    return ValidationResponses(uids=uids, sources=[source] * len(uids), variables={name: values})


def compare(a, b, **options):
    return paired_differences({"set": responses(a)}, {"set": responses(b)}, **options)["set"]


def oracle(a, b, *, num_draws, seed):
    """Bootstrap over prompts: interval of the mean difference, and p with the draws centred on no difference."""
    generator = np.random.default_rng(seed)
    differences = np.array([np.mean(second) - np.mean(first) for first, second in zip(a, b, strict=True)])
    chosen = generator.integers(len(differences), size=(num_draws, len(differences)))
    means = differences[chosen].mean(axis=1)
    p = np.mean(np.abs(means - differences.mean()) >= abs(differences.mean()))
    return *np.quantile(means, [0.025, 0.975]), p


@pytest.mark.parametrize("gain", [0.0, 0.08, 0.16])
def test_interval_and_p_are_those_of_a_bootstrap(gain):
    generator = np.random.default_rng(3)
    chances = generator.uniform(size=150)
    a = (generator.uniform(size=(150, 4)) < chances[:, None]).astype(float)
    b = (generator.uniform(size=(150, 4)) < chances[:, None] + gain).astype(float)
    found = compare(a, b, num_draws=40_000)
    low, high, p = oracle(a, b, num_draws=40_000, seed=5)
    assert (found.a, found.b) == (pytest.approx(a.mean()), pytest.approx(b.mean()))
    assert (found.low, found.high) == (pytest.approx(low, abs=2e-3), pytest.approx(high, abs=2e-3))
    assert found.p == pytest.approx(p, abs=0.01)
    assert found.num_prompts == 150


def test_p_is_the_share_of_all_resamples():
    differences = np.array([0.0, 0.5, 0.25, -0.25, 1.0, 0.75])
    means = [np.mean(draw) for draw in itertools.product(differences, repeat=6)]
    exact = np.mean(np.abs(np.array(means) - differences.mean()) >= differences.mean() - 1e-12)
    found = compare([[0.0]] * 6, differences[:, None], num_draws=100_000)
    assert found.p == pytest.approx(max(exact, 2**-4), abs=0.005)


def test_a_few_equal_differences_are_not_certain():
    assert compare([[0.0]] * 3, [[1.0]] * 3).p == 0.25  # the sign test's: both sides of 1/8
    assert compare([[0.0]] * 10, [[1.0]] * 10).p == 2**-9
    assert compare([[0.5]] * 9, [[0.5]] * 9).p == 1.0
    assert compare([[0.0]], [[1.0]]).p == 1.0


def test_equal_policies_are_rarely_called_different():
    generator = np.random.default_rng(0)
    draws = generator.integers(0, 2, size=(300, 2, 40)).astype(float)
    significant = [compare(a[:, None], b[:, None], num_draws=500).p < 0.05 for a, b in draws]
    assert 0.02 < np.mean(significant) < 0.09


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
    with pytest.raises(DataError, match="no prompt of 'set' that both answered"):
        compare([[nan]], [[1.0]])


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
