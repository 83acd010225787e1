"""Majority votes over responses drawn with replacement: exact winning probabilities of predictions.

The counts of drawn predictions follow a multinomial distribution, which equals that of independent Poisson variables
given their sum. In the product of their generating functions, truncated where another prediction would win, the
probability is one coefficient, which a short Fourier sum extracts. The product over all predictions is evaluated once,
and divided by the factor of each possible winner.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rl_metrics.validation.responses import NO_VOTE, Floats, Ints, ResponseTable

Complexes = NDArray[np.complex128]

MAX_VOTES = 256
"""Maximum number of votes; more take long and add little information."""

NEGLIGIBLE = 1e-18
"""Probabilities below this are ignored."""

CHUNK = 1 << 16
"""Number of complex numbers processed at once; bounds memory, and fits into the processor's cache."""


def vote_weights(table: ResponseTable, num_votes: int) -> Floats:
    """Return the [V] probability that the vote's value is that of each response; sums to 1 for each prompt that counts.

    `num_votes` responses of a prompt are drawn with replacement. The most frequent prediction wins, with equal
    probabilities among ties, and the value is that of one of the drawn responses with this prediction. A response
    without a prediction casts no vote; if no drawn response votes, the value is that of one of them.

    Args:
        table: Responses with votes.
        num_votes: Number of draws, at most MAX_VOTES; prompts with fewer responses get zeros.
    """
    pairs = table.prompt_of * (int(table.votes.max(initial=0)) + 2) + (table.votes - NO_VOTE)
    first, class_of, sizes = np.unique(pairs, return_index=True, return_inverse=True, return_counts=True)[1:]
    prompts, has_vote = table.prompt_of[first], table.votes[first] != NO_VOTE
    wins = np.zeros(len(sizes))
    totals = table.counts[prompts]
    for total in np.unique(totals[totals >= num_votes]):
        here = np.flatnonzero(totals == total)
        distinct, rows = np.unique(prompts[here], return_inverse=True)
        patterns = np.zeros((len(distinct), int(total) + 1), dtype=np.int64)
        voted = has_vote[here]
        np.add.at(patterns, (rows[voted], sizes[here][voted]), 1)
        patterns[rows[~voted], 0] = sizes[here][~voted]
        as_bytes = patterns.view(f"V{patterns[0].nbytes}")[:, 0]  # np.unique with axis=0 is slow for many columns
        _, kinds, kind_of = np.unique(as_bytes, return_index=True, return_inverse=True)
        found = winning_probabilities(patterns[kinds], num_votes=num_votes)
        wins[here] = found[kind_of[rows], np.where(voted, sizes[here], 0)]
    weights: Floats = (wins / sizes)[class_of]
    return weights


def winning_probabilities(patterns: Ints, *, num_votes: int) -> Floats:
    """Return the probability that a prediction wins a vote, for several distributions of responses over predictions.

    Args:
        patterns: [Q, T+1] for T responses: column c is the number of predictions with c responses, column 0 the number
            of responses without a prediction. Columns times (1, 1, 2, .., T) add up to T.
        num_votes: Number of responses drawn with replacement.

    Returns:
        [Q, T+1] probability that one prediction with c responses wins, 0 without one; column 0: that no response votes.
    """
    total = patterns.shape[1] - 1
    silent, multiplicity = patterns[:, 0], patterns[:, 1:].astype(np.float64)
    result = np.zeros(patterns.shape)
    result[:, 0] = (silent / total) ** num_votes
    sizes = np.flatnonzero(multiplicity.any(axis=0)) + 1
    if not len(sizes):
        return result
    multiplicity = multiplicity[:, sizes - 1]
    shares = sizes / total
    terms, chances = _poisson(num_votes * shares, num_votes), _binomial(shares, num_votes)
    chance_of_sum = float(_poisson(np.asarray([float(num_votes)]), num_votes)[0, num_votes])
    silent_factors = np.exp((silent * (num_votes / total))[:, None] * (_fourier_roots(num_votes)[0][1] - 1.0))
    can_win = _can_win(multiplicity, silent, terms=terms, chances=chances, chance_of_sum=chance_of_sum)
    found = np.zeros(multiplicity.shape)
    for counts, places, weights in _blocks(np.flatnonzero(can_win.any(axis=0)), multiplicity, num_votes=num_votes):
        factors = _factors(counts, places, terms=terms)
        coefficients = _coefficients(counts, weights, num_votes=num_votes)
        readings = _parts(terms[:, counts, None] / chance_of_sum / factors)
        rows = np.flatnonzero(can_win[:, counts].any(axis=1))
        step = max(1, CHUNK // coefficients.size)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            products = silent_factors[part, None] * coefficients
            _multiply(products, factors, multiplicity[part])
            found[part] += _parts(products.conj()) @ readings.T
    result[:, sizes] = np.where(multiplicity > 0, found, 0.0)
    return np.clip(result, 0.0, 1.0)


def _can_win(
    multiplicity: Floats, silent: Ints, *, terms: Floats, chances: Floats, chance_of_sum: float
) -> NDArray[np.bool_]:
    """Return [Q, n+1] whether a winner can have each count: some prediction has it, and probably none exceeds it.

    Args:
        multiplicity: [Q, S] number of predictions of each size.
        silent: [Q] number of responses without a prediction.
        terms: [S, n+1] Poisson probabilities that a prediction of each size is drawn 0 to n times.
        chances: [S, n+1] binomial probabilities of the same.
        chance_of_sum: Probability that the Poisson variables of all predictions have the sum n.
    """
    counts = np.arange(terms.shape[1])
    some: Floats = (multiplicity > 0).astype(np.float64) @ (chances > NEGLIGIBLE)
    none_above: Floats = multiplicity @ np.log(np.cumsum(terms, axis=1)) - math.log(chance_of_sum)
    fewest = np.where(silent > 0, 1, np.ceil(counts[-1] / np.maximum(multiplicity.sum(axis=1), 1)))
    can_win: NDArray[np.bool_] = (some > 0) & (none_above > math.log(NEGLIGIBLE)) & (counts >= fewest[:, None])
    return can_win


def _blocks(counts: Ints, multiplicity: Floats, *, num_votes: int) -> Iterator[tuple[Ints, Floats, Floats]]:
    """Yield the nodes for integrating over ties, of all counts, in blocks bounded by CHUNK.

    Yields:
        [J] count of the winner, increasing, repeated for each of its nodes; [J] positions from 0 to 1; [J] weights.
    """
    most = int(multiplicity.sum(axis=1).max())
    ties = [_tie_nodes(min(num_votes // count, most)) for count in counts.tolist()]
    num_nodes = np.array([len(places) for places, _ in ties], dtype=np.int64)
    num_roots = len(_fourier_roots(num_votes)[1])
    block_of = np.cumsum(num_nodes * num_roots * multiplicity.shape[1]) // CHUNK
    for block in np.unique(block_of):
        here = np.flatnonzero(block_of == block)
        places, weights = (np.concatenate([ties[index][part] for index in here]) for part in (0, 1))
        yield np.repeat(counts[here], num_nodes[here]), places, weights


def _factors(counts: Ints, places: Floats, *, terms: Floats) -> Complexes:
    """Return [S, J, L] generating functions of a prediction drawn less often than the winner, or tied with it."""
    roots, _ = _fourier_roots(terms.shape[1] - 1)
    first, last = counts[0], counts[-1]
    below = np.empty((len(terms), last - first + 1, roots.shape[1]), dtype=np.complex128)
    below[:, 0] = terms[:, :first] @ roots[:first] + 1e-300  # no factor is 0
    np.multiply(terms[:, first:last, None], roots[first:last], out=below[:, 1:])
    factors: Complexes = below.cumsum(axis=1)[:, counts - first]
    factors += (places * terms[:, counts])[:, :, None] * roots[counts]
    return factors


def _coefficients(counts: Ints, weights: Floats, *, num_votes: int) -> Complexes:
    """Return the [J, L] factors that extract the coefficient of the remaining votes, without the winner's."""
    roots, root_weights = _fourier_roots(num_votes)
    return (weights[:, None] * root_weights) * roots[num_votes - counts].conj()


def _multiply(products: Complexes, factors: Complexes, exponents: Floats) -> None:
    """Multiply [Q, J, L] products by [S, J, L] factors to the powers [Q, S]."""
    for factor, of_rows in zip(factors, exponents.T, strict=True):
        for exponent in set(of_rows.tolist()) - {0.0}:
            products[of_rows == exponent] *= factor if exponent == 1 else factor ** int(exponent)


def _parts(numbers: Complexes) -> Floats:
    """Return [X, ..] real and imaginary parts."""
    parts: Floats = numbers.reshape(len(numbers), -1).view(np.float64)
    return parts


@lru_cache(maxsize=MAX_VOTES)
def _tie_nodes(max_winners: int) -> tuple[Floats, Floats]:
    """Return nodes and weights for exact integrals over [0, 1]: with t ties, u**t integrates to 1 / (t + 1)."""
    nodes, weights = np.polynomial.legendre.leggauss((max_winners - 1) // 2 + 1)
    return (nodes + 1.0) / 2.0, weights / 2.0


@lru_cache(maxsize=16)
def _fourier_roots(num_votes: int) -> tuple[Complexes, Floats]:
    """Return powers 0 to n of half of the roots of unity, and weights that extract a real coefficient.

    The number of roots, L, is large enough to avoid aliasing with other coefficients.

    Returns:
        [n+1, L] and [L].
    """
    length = 3
    while _poisson_tail(num_votes, length) > NEGLIGIBLE:
        length += 2
    half = np.arange(length // 2 + 1)
    weights = np.where(half == 0, 1.0, 2.0) / length
    return np.exp(2j * np.pi / length * (np.arange(num_votes + 1)[:, None] * half % length)), weights


def _poisson_tail(mean: int, distance: int) -> float:
    above = math.exp((mean + distance) * math.log(mean) - mean - math.lgamma(mean + distance + 1))
    if distance > mean:
        return above
    return above + math.exp((mean - distance) * math.log(mean) - mean - math.lgamma(mean - distance + 1))


def _log_factorials(largest: int) -> Floats:
    sums: Floats = np.cumsum(np.log(np.maximum(np.arange(largest + 1), 1)))
    return sums


def _poisson(rates: Floats, largest: int) -> Floats:
    """Return [C, largest+1] probabilities of 0 to largest, for each rate above 0."""
    counts = np.arange(largest + 1)
    chances: Floats = np.exp(counts * np.log(rates)[:, None] - rates[:, None] - _log_factorials(largest))
    return chances


def _binomial(chances: Floats, num_draws: int) -> Floats:
    """Return [C, num_draws+1] probabilities of 0 to num_draws hits."""
    counts, logs = np.arange(num_draws + 1), _log_factorials(num_draws)
    choose = logs[-1] - logs - logs[::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        misses = np.where(counts == num_draws, 0.0, (num_draws - counts) * np.log1p(-chances)[:, None])
    found: Floats = np.exp(choose + counts * np.log(chances)[:, None] + misses)
    return found
