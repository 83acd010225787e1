import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import FLOAT64, rounding_bound

from rl_metrics.validation import majority
from rl_metrics.validation.majority import vote_weights, winning_probabilities
from rl_metrics.validation.responses import response_table


def pattern(sizes, silent=0):
    columns = np.zeros(sum(sizes) + silent + 1, dtype=np.int64)
    for size in sizes:
        columns[size] += 1
    columns[0] = silent
    return columns


def enumerated(sizes, silent, num_votes):
    """Return each prediction's probability of winning, from all draws; the last entry is for draws without votes."""
    responses = [index for index, size in enumerate(sizes) for _ in range(size)] + [None] * silent
    wins = np.zeros(len(sizes) + 1)
    for draw in itertools.product(responses, repeat=num_votes):
        votes = Counter(vote for vote in draw if vote is not None)
        winners = [vote for vote, count in votes.items() if count == max(votes.values())]
        for winner in winners:
            wins[winner] += 1 / len(winners)
        wins[-1] += not winners
    return wins / len(responses) ** num_votes


def multiplied(polynomial, sizes, largest):
    """Multiply polynomials with coefficients by (votes, ties); an exponent of `largest` votes counts as a tie."""
    product = {}
    for size, (votes, ties) in itertools.product(sizes, polynomial):
        new = votes + size, ties + (size == largest)
        product[new] = product.get(new, 0) + polynomial[votes, ties] * sizes[size]
    return product


def counted(sizes, silent, num_votes):
    """Return each prediction's probability of winning, from the multinomial distribution in exact fractions."""
    wins = [Fraction(0)] * len(sizes)
    for index, count in itertools.product(range(len(sizes)), range(1, num_votes + 1)):
        found = {(count, 0): Fraction(sizes[index] ** count, math.factorial(count))}
        for size in sizes[:index] + sizes[index + 1 :]:
            terms = {drawn: Fraction(size**drawn, math.factorial(drawn)) for drawn in range(count + 1)}
            found = multiplied(found, terms, count)
        terms = {drawn: Fraction(silent**drawn, math.factorial(drawn)) for drawn in range(num_votes + 1)}
        found = multiplied(found, terms, None)
        wins[index] += sum((found[votes, ties] / (ties + 1) for votes, ties in found if votes == num_votes), Fraction())
    scale = Fraction(math.factorial(num_votes), (sum(sizes) + silent) ** num_votes)
    return [float(win * scale) for win in wins]


def test_probabilities_equal_hand_computed_ones():
    # Two draws from A, A, B: A A (4/9) and B B (1/9) are clear, A B (4/9) is a tie.
    found = winning_probabilities(pattern([2, 1])[None], num_votes=2)[0]
    np.testing.assert_allclose(found, [0.0, 1 / 3, 2 / 3, 0.0], atol=1e-15)
    # Two draws from A and one response without a prediction: A loses only if neither draw is A.
    found = winning_probabilities(pattern([1], silent=1)[None], num_votes=2)[0]
    np.testing.assert_allclose(found, [1 / 4, 3 / 4, 0.0], atol=1e-15)


@pytest.mark.parametrize(
    ("sizes", "silent", "num_votes"),
    [
        ([1, 1, 1], 0, 3),
        ([3, 1, 1], 0, 5),
        ([2, 2, 1], 0, 4),
        ([1, 1, 1, 1], 2, 4),
        ([4, 2], 0, 6),
        ([5], 0, 5),
        ([], 3, 3),
        ([1], 4, 5),
    ],
)
def test_agrees_with_all_draws(sizes, silent, num_votes):
    found = winning_probabilities(pattern(sizes, silent)[None], num_votes=num_votes)[0]
    expected = enumerated(sizes, silent, num_votes)
    np.testing.assert_allclose([found[size] for size in sizes], expected[:-1], atol=1e-13)
    assert found[0] == pytest.approx(expected[-1], abs=1e-13)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 5), st.integers(1, 9))
def test_agrees_with_exact_fractions(sizes, silent, num_votes):
    found = winning_probabilities(pattern(sizes, silent)[None], num_votes=num_votes)[0]
    np.testing.assert_allclose([found[size] for size in sizes], counted(sizes, silent, num_votes), atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(0, 12), st.integers(1, 40))
def test_somebody_wins_and_more_responses_win_more_often(sizes, silent, num_votes):
    found = winning_probabilities(pattern(sizes, silent)[None], num_votes=num_votes)[0]
    assert sum(found[size] for size in sizes) + found[0] == pytest.approx(1.0, abs=1e-11)
    ordered = [found[size] for size in sorted(set(sizes))]
    assert (np.diff(ordered) >= -1e-12).all()


def test_many_ways_at_once_are_each_as_alone():
    patterns = np.stack([pattern([3, 2, 1]), pattern([6]), pattern([2, 2, 1], 1), pattern([1] * 6), pattern([], 6)])
    together = winning_probabilities(patterns, num_votes=6)
    for row, alone in zip(together, patterns, strict=True):
        np.testing.assert_allclose(row, winning_probabilities(alone[None], num_votes=6)[0], atol=1e-14)


def test_a_large_vote_is_won_by_the_majority():
    found = winning_probabilities(pattern([129, 127])[None], num_votes=256)[0]
    assert found[129] + found[127] == pytest.approx(1.0, abs=1e-11)
    assert 0.5 < found[129] < 0.6  # expected lead: 1.125 votes, with a standard deviation of 16
    assert winning_probabilities(pattern([200, 56])[None], num_votes=256)[0][200] == pytest.approx(1.0, abs=1e-11)


def test_weights_of_responses_are_those_of_their_predictions():
    # Prompt 0: A A B with values 0.2, 0.4, 1.0. Prompt 1 has too few responses, prompt 2 no predictions.
    table = response_table([0.2, 0.4, 1.0, 5.0, 7.0, 8.0], prompt_of=[0, 0, 0, 1, 2, 2], votes=[4, 4, 9, 4, -1, -1])
    np.testing.assert_allclose(vote_weights(table, 2), [1 / 3, 1 / 3, 1 / 3, 0.0, 0.5, 0.5], atol=1e-15)


RAGGED = st.lists(st.tuples(st.lists(st.integers(1, 7), max_size=4), st.integers(0, 3)), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None)
@given(RAGGED, st.integers(1, 6))
def test_weights_of_prompts_with_different_numbers_of_responses_are_exact(prompts, num_votes):
    prompts = [(sizes, silent) for sizes, silent in prompts if sizes or silent]
    columns, expected = [], []
    for row, (sizes, silent) in enumerate(prompts):
        total = sum(sizes) + silent
        chances = [*counted(sizes, silent, num_votes), (silent / total) ** num_votes]
        for vote, (size, chance) in enumerate(zip([*sizes, silent], chances, strict=True)):
            columns += [(row, -1 if vote == len(sizes) else vote)] * size
            expected += [chance / max(size, 1) if total >= num_votes else 0.0] * size
    rows, votes = np.array(columns).reshape(-1, 2).T
    table = response_table(np.arange(len(rows)), prompt_of=rows, votes=votes)
    np.testing.assert_allclose(vote_weights(table, num_votes), expected, atol=1e-14)


@pytest.mark.parametrize(("mean", "distance"), [(4, 3), (4, 4), (9, 2), (2, 5)])
def test_tails_are_the_two_probabilities_at_a_distance_from_the_mean(mean, distance):
    chances = [math.exp(-mean) * mean**count / math.factorial(count) for count in range(20)]
    expected = chances[mean + distance] + (chances[mean - distance] if distance <= mean else 0.0)
    assert majority._poisson_tail(mean, distance) == pytest.approx(expected, rel=1e-12)


def test_hits_have_a_binomial_distribution():
    expected = [[math.comb(7, hits) * p**hits * (1 - p) ** (7 - hits) for hits in range(8)] for p in (0.1, 0.75, 1.0)]
    np.testing.assert_allclose(majority._binomial(np.array([0.1, 0.75, 1.0]), 7), expected, rtol=1e-13)


def test_blocks_of_counts_and_rows_add_up(monkeypatch):
    patterns = np.stack([pattern([20, 7, 2, 1]), pattern([3] * 10), pattern([1] * 25, 5), pattern([15, 14], 1)])
    together = winning_probabilities(patterns, num_votes=30)
    monkeypatch.setattr(majority, "CHUNK", 1)  # one count and one row per block
    bound = rounding_bound(1.0, roundings=len(patterns[0]), epsilon=FLOAT64)  # probabilities add up to 1
    np.testing.assert_allclose(winning_probabilities(patterns, num_votes=30), together, rtol=0, atol=bound)
