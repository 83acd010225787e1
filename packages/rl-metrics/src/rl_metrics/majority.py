"""Majority votes over responses drawn with replacement: exactly how likely each prediction wins.

How often predictions are drawn follows a multinomial distribution, which is that of independent Poisson variables
given their sum. A product of their generating functions, cut off where another prediction would win, has the
probability as one coefficient, which a short Fourier sum reads.
"""

import math

import numpy as np
from numpy.typing import NDArray

from rl_metrics.validation_responses import NO_VOTE, Floats, Ints, ResponseTable

Complexes = NDArray[np.complex128]

MAX_VOTES = 256
"""Votes of more responses are not computed: they take long, and say hardly more."""

NEGLIGIBLE = 1e-18
"""Probabilities below this are not looked for."""

CHUNK = 1_000_000
"""Complex numbers at once: bounds the memory."""


def vote_weights(table: ResponseTable, num_votes: int) -> Floats:
    """[V] how likely it is that the vote's value is that of each response; sums to 1 for each prompt that counts.

    `num_votes` responses of a prompt are drawn with replacement. The prediction that is drawn most often wins, among
    several that are drawn as often each is as likely, and the value is that of one of the drawn responses that
    gave it. A response without a prediction casts no vote; where nobody votes the value is that of one of these.

    Args:
        table: With votes.
        num_votes: At most MAX_VOTES; prompts with fewer responses get zeros.
    """
    if table.votes is None:
        return np.zeros(len(table.values))
    pairs = table.prompt_of * (int(table.votes.max(initial=0)) + 2) + (table.votes - NO_VOTE)
    first, class_of, sizes = np.unique(pairs, return_index=True, return_inverse=True, return_counts=True)[1:]
    prompts, has_vote = table.prompt_of[first], table.votes[first] != NO_VOTE
    wins = np.zeros(len(sizes))
    totals = table.counts[prompts]
    for total in np.unique(totals[totals >= num_votes]):
        here = np.flatnonzero(totals == total)
        _, rows = np.unique(prompts[here], return_inverse=True)
        patterns = np.zeros((int(rows.max()) + 1, int(total) + 1), dtype=np.int64)
        voted = has_vote[here]
        np.add.at(patterns, (rows[voted], sizes[here][voted]), 1)
        patterns[rows[~voted], 0] = sizes[here][~voted]
        kinds, kind_of = np.unique(patterns, axis=0, return_inverse=True)
        found = winning_probabilities(kinds, num_votes=num_votes)
        wins[here] = found[kind_of.ravel()[rows], np.where(voted, sizes[here], 0)]
    weights: Floats = (wins / sizes)[class_of]
    return weights


def winning_probabilities(patterns: Ints, *, num_votes: int) -> Floats:
    """How likely a prediction wins a vote, for several ways in which responses may be shared among predictions.

    Args:
        patterns: [Q, T+1] of T responses: column c is how many predictions have c responses, column 0 how many
            responses have no prediction. Columns times (1, 1, 2, .., T) add up to T.
        num_votes: Responses that are drawn with replacement.

    Returns:
        [Q, T+1] probability that one prediction of c responses wins, where there is one; in column 0 that nobody votes.
    """
    total = patterns.shape[1] - 1
    silent, multiplicity = patterns[:, 0], patterns[:, 1:].astype(np.float64)
    result = np.zeros(patterns.shape)
    result[:, 0] = (silent / total) ** num_votes
    sizes = np.flatnonzero(multiplicity.any(axis=0)) + 1
    if not len(sizes):
        return result
    multiplicity = multiplicity[:, sizes - 1]
    roots, root_weights = _fourier_roots(num_votes)
    silent_log: Complexes = (silent * (num_votes / total))[:, None] * (roots - 1.0)
    terms = _poisson(num_votes * sizes / total, num_votes)
    chance_of_sum = _poisson(np.asarray([float(num_votes)]), num_votes)[0, num_votes]
    bounds = _binomial(sizes / total, num_votes)
    can_win_with = np.where(silent > 0, 1, np.ceil(num_votes / np.maximum(multiplicity.sum(axis=1), 1)))
    below: Complexes = np.zeros((len(sizes), len(roots)), dtype=np.complex128)
    for count in range(1, num_votes + 1):  # how often the winner is drawn
        below = below + terms[:, count - 1, None] * roots ** (count - 1)
        nodes, node_weights = _tie_nodes(num_votes // count)
        tied = nodes[:, None] * (terms[:, count, None, None] * roots**count)
        logs = np.log(below[:, None, :] + tied + 1e-300).reshape(len(sizes), -1)
        reading = (node_weights[:, None] * (root_weights * roots ** (count - num_votes))).ravel()
        for at in np.flatnonzero(bounds[:, count] > NEGLIGIBLE):
            rows = np.flatnonzero((multiplicity[:, at] > 0) & (can_win_with <= count))
            others = multiplicity[rows] - (np.arange(len(sizes)) == at)
            coefficients = _read(others, silent_log[rows], logs=logs, reading=reading)
            result[rows, sizes[at]] += terms[at, count] / chance_of_sum * coefficients
    return np.clip(result, 0.0, 1.0)


def _read(others: Floats, silent_log: Complexes, *, logs: Complexes, reading: Complexes) -> Floats:
    """[Q] coefficient of each row's product of generating functions, given as logs, at the Fourier roots."""
    found = np.zeros(len(others))
    num_nodes = logs.shape[1] // silent_log.shape[1]
    step = max(1, CHUNK // logs.shape[1])
    for start in range(0, len(others), step):
        part = slice(start, start + step)
        exponents = others[part] @ logs.real + 1j * (others[part] @ logs.imag)
        found[part] = (np.exp(exponents + np.tile(silent_log[part], num_nodes)) @ reading).real
    return found


def _tie_nodes(max_winners: int) -> tuple[Floats, Floats]:
    """Nodes and weights that integrate from 0 to 1 exactly: with t others as often drawn, u**t gives 1 / (t + 1)."""
    nodes, weights = np.polynomial.legendre.leggauss((max_winners - 1) // 2 + 1)
    return (nodes + 1.0) / 2.0, weights / 2.0


def _fourier_roots(num_votes: int) -> tuple[Complexes, Floats]:
    """Half of the roots of unity, with weights that read a real coefficient; enough that no other one mixes in."""
    length = 3
    while _poisson_tail(num_votes, length) > NEGLIGIBLE:
        length += 2
    half = np.arange(length // 2 + 1)
    weights = np.where(half == 0, 1.0, 2.0) / length
    return np.exp(2j * np.pi * half / length), weights


def _poisson_tail(mean: int, distance: int) -> float:
    above = math.exp((mean + distance) * math.log(mean) - mean - math.lgamma(mean + distance + 1))
    if distance > mean:
        return above
    return above + math.exp((mean - distance) * math.log(mean) - mean - math.lgamma(mean - distance + 1))


def _log_factorials(largest: int) -> Floats:
    sums: Floats = np.cumsum(np.log(np.maximum(np.arange(largest + 1), 1)))
    return sums


def _poisson(rates: Floats, largest: int) -> Floats:
    """[C, largest+1] probabilities of 0 to largest, for each rate above 0."""
    counts = np.arange(largest + 1)
    chances: Floats = np.exp(counts * np.log(rates)[:, None] - rates[:, None] - _log_factorials(largest))
    return chances


def _binomial(chances: Floats, num_draws: int) -> Floats:
    """[C, num_draws+1] probabilities of 0 to num_draws hits."""
    counts, logs = np.arange(num_draws + 1), _log_factorials(num_draws)
    choose = logs[-1] - logs - logs[::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        misses = np.where(counts == num_draws, 0.0, (num_draws - counts) * np.log1p(-chances)[:, None])
    found: Floats = np.exp(choose + counts * np.log(chances)[:, None] + misses)
    return found
