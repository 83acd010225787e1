"""Bounds between two computations of one sum."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rounding import FLOAT32, rounding_bound


def in_turn(terms: np.ndarray) -> float:
    total = np.float32(0)
    for term in terms:
        total += term
    return float(total)


@given(st.integers(0, 2**32 - 1), st.integers(2, 60))
def test_a_sum_in_another_order_is_within_the_bound_and_a_sum_without_a_term_is_not(seed: int, num_terms: int) -> None:
    random = np.random.default_rng(seed)
    terms = random.normal(size=num_terms).astype(np.float32)
    terms[-1] = -terms[:-1].sum()  # the sum is near 0, where no relative bound holds
    bound = rounding_bound(float(np.abs(terms).sum()), roundings=num_terms)

    found, expected = in_turn(random.permutation(terms)), in_turn(terms)

    assert abs(found - expected) <= bound
    largest = np.abs(terms).argmax()
    assert abs(in_turn(np.delete(terms, largest)) - expected) > bound


def test_the_bound_counts_roundings_in_units_of_the_dtype() -> None:
    assert rounding_bound(3.0, roundings=2) == 6 * FLOAT32 == 6 * float(np.finfo(np.float32).eps)
    assert rounding_bound(1.0) < 5e-6
