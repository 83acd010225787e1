"""Bounds on how far two computations of one sum may differ.

Equal bits are a promise of two runs of the same code on the same numbers. Another implementation, layout or grouping
adds in another order, and so does the same code on another processor.
"""

FLOAT64, FLOAT32, BFLOAT16 = 2.0**-52, 2.0**-23, 2.0**-7
"""Distance from 1 to the next number of each dtype."""

MODEL_ROUNDINGS = 40
"""Roundings in a logprob or gradient of the tests' models, of up to four layers: 40 x 2**-23 = 5e-6."""


def rounding_bound(summed: float, *, roundings: int = MODEL_ROUNDINGS, epsilon: float = FLOAT32) -> float:
    """Return the largest difference between two computations of one sum.

    A rounding changes a term by at most epsilon / 2 of its size, and the two computations may round in opposite
    directions.

    Args:
        summed: Sum of the absolute values of the terms, not the size of a sum in which they cancel.
        roundings: Number of roundings that a term passes through, such as the additions after it.
        epsilon: Distance from 1 to the next number of the dtype.

    Source: Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    return roundings * epsilon * summed
