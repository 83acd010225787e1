"""Histograms of bounded size with exact merges.

A value counts in the bucket of its logarithm, so counts are independent of the order of values and of their split over
micro-batches and ranks.

Source: Masson et al. 2019, "DDSketch", arXiv:1908.10693.
"""

import functools
import math
import re
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from ddsketch import CollapsingLowestDenseStore, CubicallyInterpolatedMapping
from numpy.typing import ArrayLike, NDArray

from rl_core.data import Json
from rl_core.errors import DataError

ACCURACY = 0.02
"""Maximum relative error of a quantile."""

BIN_LIMIT = 1024
"""Maximum number of buckets per sign; values about 1e17 times smaller than the largest share the lowest bucket."""

MAX_COUNT = 2**53
"""Maximum number of values; up to it, the library's float counts are exact."""

# The library's mapping without a logarithm: with IEEE arithmetic, a value has the same key on every machine.
MAPPING = CubicallyInterpolatedMapping(ACCURACY)
MULTIPLIER = 1 / math.log1p(2 * ACCURACY / (1 - ACCURACY)) / MAPPING.C
LOWEST_KEY, HIGHEST_KEY = MAPPING.key(MAPPING.min_possible), MAPPING.key(MAPPING.max_possible)

CHUNK = 2**13
"""Number of values counted at once, so that their arrays fit into the processor's cache."""

SUM_EXPONENT = -1126
"""Sums are stored as integer multiples of 2 to this power, the last mantissa bit of the smallest float."""

SUM = re.compile(r"(-?)0x([0-9a-f]{1,600})p(-?[0-9]{1,4})")

Array = NDArray[Any]


_Buckets = tuple[Array, Array, Array]
"""Low ends, high ends and counts of the nonempty buckets, lowest values first."""


class Histogram:
    """Counts of values by size, accurate to 2 %; count, sum, mean, minimum and maximum are exact.

    It stores at most 2049 counts, whatever the number of values. NaN and infinite values are counted separately.
    """

    def __init__(self) -> None:
        """Create an empty histogram."""
        self._positive = CollapsingLowestDenseStore(BIN_LIMIT)
        self._negative = CollapsingLowestDenseStore(BIN_LIMIT)  # by magnitude
        self._num_zeros = 0
        self._sum = 0  # in units of 2**SUM_EXPONENT
        self._min = math.inf
        self._max = -math.inf
        self._num_nonfinite = 0

    @property
    def count(self) -> int:
        """Number of finite values."""
        return int(self._negative.count) + self._num_zeros + int(self._positive.count)

    @property
    def num_nonfinite(self) -> int:
        """Number of NaN and infinite values; all other statistics exclude them."""
        return self._num_nonfinite

    @property
    def sum(self) -> float:
        """The sum of the finite values, correctly rounded."""
        return rounded(_exact(self._sum))

    @property
    def mean(self) -> float:
        """The mean, correctly rounded; NaN without values."""
        return rounded(_exact(self._sum) / self.count) if self.count else math.nan

    @property
    def min(self) -> float:
        """The smallest value; NaN without values."""
        return self._min if self.count else math.nan

    @property
    def max(self) -> float:
        """The largest value; NaN without values."""
        return self._max if self.count else math.nan

    def add(self, values: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Count values.

        Args:
            values: Numbers in an array of any shape.
            weights: Number of occurrences of each value, as integers; None counts each once.

        Raises:
            DataError: A value is not a number, or weights are not integers >= 0, one per value.
        """
        numbers = _numbers(values)
        counts = None if weights is None else _whole_numbers(weights, len(numbers))
        for start in range(0, len(numbers), CHUNK):
            part = slice(start, start + CHUNK)
            self._add(numbers[part], None if counts is None else counts[part])

    def merge(self, other: "Histogram") -> None:
        """Add the values of another histogram."""
        self._check_room(other.count)
        self._positive.merge(other._positive)
        self._negative.merge(other._negative)
        self._num_zeros += other._num_zeros
        self._sum += other._sum
        self._min, self._max = min(self._min, other._min), max(self._max, other._max)
        self._num_nonfinite += other._num_nonfinite

    def quantile(self, q: float) -> float:
        """Return the value of rank q * (count - 1), accurate to 2 %; NaN without values.

        It is exact if the sum proves that a bucket holds only the minimum or maximum, as for rewards of 0 or 1.

        Args:
            q: Quantile from 0, the minimum, to 1, the maximum; both are exact.

        Raises:
            DataError: q is outside [0, 1].
        """
        if not 0 <= q <= 1:
            raise DataError(f"a quantile must be in [0, 1]; found {q}.")
        if not self.count or q in (0, 1):
            return self.max if q == 1 else self.min
        lows, highs, counts = self._narrowed(self._buckets())
        found = int(np.searchsorted(np.cumsum(counts), math.floor(q * (self.count - 1)), side="right"))
        low, high = float(lows[found]), float(highs[found])
        # This value minimizes the relative error within the bucket; low + high may overflow.
        value = low / (low / 2 + high / 2) * high if low < high and low else low
        return min(max(value, self._min), self._max)

    def bins(self, limit: int = 30) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return bins for plots, of equal width as far as buckets allow, with exact counts.

        Args:
            limit: Maximum number of bins, at least 1.

        Returns:
            [B + 1] increasing edges from the smallest to the largest value, and [B] counts; both empty without values.
        """
        if not self.count:
            return np.empty(0), np.empty(0, dtype=np.int64)
        lows, highs, counts = self._buckets()
        low, high = self._min, self._max
        if low == high:
            low, high = low - 0.5, high + 0.5  # as numpy does for a single value
        if not low < high:
            low, high = np.nextafter(self._min, -math.inf), np.nextafter(self._max, math.inf)
        shares = np.linspace(0.0, 1.0, limit + 1)[1:-1]
        edges = low * (1 - shares) + high * shares  # high - low may overflow
        at = np.searchsorted(highs, edges, side="left").clip(0, len(counts) - 1)
        edges = np.where(lows[at] < edges, highs[at], edges)  # no edge within a bucket
        edges = np.unique([low, *edges[(edges > low) & (edges < high)], high])
        middles = lows / 2 + highs / 2
        places = (np.searchsorted(edges, middles, side="right") - 1).clip(0, len(edges) - 2)
        return edges, np.bincount(places, weights=counts, minlength=len(edges) - 1).astype(np.int64)

    def to_json(self) -> dict[str, Json]:
        """Return the exact state as JSON values; equal for equal values, however they were split."""
        return {
            "accuracy": ACCURACY,
            "count": self.count,
            "sum": _sum_text(self._sum),
            "min": self._min if self.count else None,
            "max": self._max if self.count else None,
            "nonfinite": self._num_nonfinite,
            "zeros": self._num_zeros,
            "positive": [list(column) for column in _columns(self._positive)],
            "negative": [list(column) for column in _columns(self._negative)],
        }

    @classmethod
    def from_json(cls, state: object) -> "Histogram":
        """Restore a histogram from `to_json`.

        Raises:
            DataError: The value is not a histogram's JSON.
        """
        histogram = cls()
        try:
            histogram._read(state)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise DataError(f"a histogram must be an object of Histogram.to_json; {error}.") from error
        return histogram

    def _read(self, state: Any) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(type(state).__name__)
        if state["accuracy"] != ACCURACY:
            raise ValueError(f"accuracy must be {ACCURACY}")
        self._num_zeros = _checked_count(state["zeros"])
        self._num_nonfinite = _checked_count(state["nonfinite"])
        for store, columns in ((self._positive, state["positive"]), (self._negative, state["negative"])):
            for key, count in _checked_columns(columns):
                store.add(key, count)
        if self.count != state["count"] or self.count > MAX_COUNT:
            raise ValueError("count is not the sum of the counts")
        self._sum = _sum_of(state["sum"])
        if self.count:
            self._min, self._max = _checked_number(state["min"]), _checked_number(state["max"])
            if self._min > self._max:
                raise ValueError("min is above max")

    def _add(self, values: Array, counts: Array | None) -> None:
        is_finite = np.isfinite(values)
        if not is_finite.all():
            self._num_nonfinite += int((~is_finite).sum() if counts is None else counts[~is_finite].sum())
            values, counts = values[is_finite], None if counts is None else counts[is_finite]
        if counts is not None:
            values, counts = values[counts > 0], counts[counts > 0]
        if not len(values):
            return
        self._check_room(len(values) if counts is None else int(counts.sum()))
        mantissas, exponents = np.frexp(values)
        self._sum += _exact_sum(mantissas, exponents, counts)
        self._min, self._max = min(self._min, float(values.min())), max(self._max, float(values.max()))
        keys = _keys(np.abs(mantissas), exponents)
        is_positive, is_negative = values > MAPPING.min_possible, values < -MAPPING.min_possible
        for store, chosen in ((self._positive, is_positive), (self._negative, is_negative)):
            _count(store, keys[chosen], None if counts is None else counts[chosen])
        is_zero = ~(is_positive | is_negative)
        self._num_zeros += int(is_zero.sum() if counts is None else counts[is_zero].sum())

    def _check_room(self, num_more: int) -> None:
        if self.count + num_more > MAX_COUNT:
            raise DataError(
                f"a histogram can hold {MAX_COUNT} values; found {self.count + num_more}. Use another for more values."
            )

    def _narrowed(self, buckets: _Buckets) -> _Buckets:
        """Narrow the first and last bucket to their value if they provably hold only one."""
        lows, highs, counts = buckets
        if counts[0] == 1:
            lows[0] = highs[0] = self._min
        if counts[-1] == 1:
            lows[-1] = highs[-1] = self._max
        (wide,) = np.nonzero(lows < highs)
        if len(wide) != 1:
            return buckets
        place = int(wide[0])
        others = [int(count) * Fraction(low) for low, count in zip(lows.tolist(), counts.tolist(), strict=True)]
        rest = _exact(self._sum) - sum(others) + others[place]
        if place == 0 and rest == int(counts[0]) * Fraction(self._min):
            lows[0] = highs[0] = self._min
        if place == len(counts) - 1 and rest == int(counts[-1]) * Fraction(self._max):
            lows[-1] = highs[-1] = self._max
        return buckets

    def _buckets(self) -> _Buckets:
        rows = [(-_high(key), -_high(key - 1), count) for key, count in reversed(list(_filled(self._negative)))]
        if self._num_zeros:
            rows.append((0.0, 0.0, self._num_zeros))
        rows += [(_high(key - 1), _high(key), count) for key, count in _filled(self._positive)]
        columns = np.asarray(rows, dtype=np.float64).T
        lows, highs = columns[0].clip(self._min, self._max), columns[1].clip(self._min, self._max)
        return lows, highs, columns[2].astype(np.int64)


def _keys(magnitudes: Array, exponents: Array) -> Array:
    """Return `MAPPING.key` of many values, bit for bit; `magnitudes` are mantissas from 0.5 to 1."""
    x = 2 * magnitudes - 1
    logs = ((MAPPING.A * x + MAPPING.B) * x + MAPPING.C) * x + (exponents - 1)
    keys: Array = np.ceil(logs * MULTIPLIER).astype(np.int64)
    return keys


@functools.lru_cache(maxsize=8192)
def _high(key: int) -> float:
    """Return the upper end of a bucket, which belongs to it."""
    return float(MAPPING.value(key) * ((1 + MAPPING.gamma) / 2)) if key <= HIGHEST_KEY else sys.float_info.max


def _count(store: CollapsingLowestDenseStore, keys: Array, counts: Array | None) -> None:
    """Add counts to a store, as `store.add` does for each key; adding the highest and lowest makes room for all."""
    if not len(keys):
        return
    lowest = int(keys.min())
    if counts is None:
        found = np.bincount(keys - lowest)
    else:  # integers below 2**53 are exact in bincount's floats
        found = np.bincount(keys - lowest, weights=counts).astype(np.int64)
    places = np.flatnonzero(found)
    rows = list(zip((places + lowest).tolist(), found[places].tolist(), strict=True))
    *between, highest = rows
    store.add(*highest)
    if between:
        store.add(*between.pop(0))
    bins, offset, least = store.bins, store.offset, store.min_key
    for key, count in between:
        bins[key - offset if key >= least else 0] += count
    store.count += sum(count for _, count in between)


def _exact_sum(mantissas: Array, exponents: Array, counts: Array | None) -> int:
    """Return the weighted sum in units of 2**SUM_EXPONENT."""
    lowest = int(exponents.min())
    shifts = (exponents - lowest).astype(np.intp)
    if counts is None:  # two halves, so that sums in floats stay exact
        scaled = mantissas * 2.0**26
        highs = np.floor(scaled)
        lows = (scaled - highs) * 2.0**27
        halves = [(np.bincount(shifts, weights=highs), 27), (np.bincount(shifts, weights=lows), 0)]
        total = sum(int(part) << (shift + up) for sums, up in halves for shift, part in enumerate(sums.tolist()))
    else:
        whole = (mantissas * 2.0**53).astype(np.int64)
        rows = zip(whole.tolist(), shifts.tolist(), counts.tolist(), strict=True)
        total = sum((number << shift) * count for number, shift, count in rows)
    return total << (lowest - 53 - SUM_EXPONENT)


def _exact(units: int) -> Fraction:
    return Fraction(units, 2**-SUM_EXPONENT)


def rounded(value: Fraction) -> float:
    """Return the nearest float; infinite if it overflows."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _sum_text(units: int) -> str:
    """Return the exact sum as text without trailing zeros, such as "-0x3p-1" for -1.5."""
    zeros = (units & -units).bit_length() - 1 if units else -SUM_EXPONENT
    return f"{units >> zeros:#x}p{zeros + SUM_EXPONENT}"


def _sum_of(text: Any) -> int:
    match = SUM.fullmatch(text)
    shift = int(match[3]) - SUM_EXPONENT if match else -1
    if match is None or not 0 <= shift <= 2 * -SUM_EXPONENT:
        raise ValueError("sum must have the form '-0x3p-1'")
    return int(match[1] + match[2], 16) << shift


def _filled(store: CollapsingLowestDenseStore) -> Iterator[tuple[int, int]]:
    return ((store.offset + place, int(count)) for place, count in enumerate(store.bins) if count)


def _columns(store: CollapsingLowestDenseStore) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows = list(_filled(store))
    return tuple(key for key, _ in rows), tuple(count for _, count in rows)


def _numbers(values: ArrayLike) -> Array:
    try:
        return np.asarray(values, dtype=np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise DataError(f"a histogram counts numbers; found {str(values)[:80]}.") from error


def _whole_numbers(weights: ArrayLike, count: int) -> Array:
    found = _numbers(weights)
    is_whole = np.isfinite(found) & (found >= 0) & (found == np.floor(found)) & (found <= MAX_COUNT)
    if len(found) != count or not is_whole.all():
        raise DataError(
            f"weights must be {count} integers >= 0, one per value; found {len(found)}, {int((~is_whole).sum())} of "
            "them invalid. Pass the number of occurrences of each value."
        )
    return found.astype(np.int64)


def _checked_columns(columns: Any) -> Iterator[tuple[int, int]]:
    if not isinstance(columns, (list, tuple)) or len(columns) != 2:
        raise ValueError("buckets must be a list of keys and a list of counts")
    keys, counts = columns
    if not isinstance(keys, (list, tuple)) or not isinstance(counts, (list, tuple)) or len(keys) > BIN_LIMIT:
        raise ValueError(f"there must be at most {BIN_LIMIT} buckets, in two lists")
    before = LOWEST_KEY - 1
    for key, count in zip(keys, counts, strict=True):
        if type(key) is not int or not before < key <= HIGHEST_KEY + 1:
            raise ValueError("keys must be increasing integers")
        before = key
        yield key, _checked_count(count, least=1)


def _checked_count(count: Any, *, least: int = 0) -> int:
    if type(count) is not int or not least <= count <= MAX_COUNT:
        raise ValueError(f"counts must be integers >= {least}")
    return count


def _checked_number(number: Any) -> float:
    if type(number) not in (int, float) or not math.isfinite(number):
        raise ValueError("min and max must be finite numbers")
    return float(number)
