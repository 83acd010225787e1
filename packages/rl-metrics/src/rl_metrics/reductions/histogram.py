"""Histograms of fixed size with exact merges.

A value counts in a bucket that depends on the value alone, so counts are independent of the order of values and of
their split over micro-batches and ranks.
"""

import math
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_core.data import Json
from rl_core.errors import DataError

PER_OCTAVE = 32
"""Buckets between a power of two and the next, equally wide and centered on multiples of their width."""

ACCURACY = 0.5 / PER_OCTAVE
"""Maximum relative error of a quantile, for magnitudes from 2**-64 (5e-20) to 2**128 (3e38)."""

EXPONENTS = range(-63, 129)
"""Exponents with buckets, as `frexp` gives them; smaller values count as 0, larger ones in the last bucket."""

NUM_KEYS = PER_OCTAVE * len(EXPONENTS)
"""Buckets per sign. Key 0 is the bucket of 0; keys rise with the values, from -NUM_KEYS to NUM_KEYS."""

Array = NDArray[Any]


def _centers() -> NDArray[np.float64]:
    octaves, shares = np.divmod(np.arange(NUM_KEYS), PER_OCTAVE)
    magnitudes = np.ldexp((PER_OCTAVE + shares) / (2 * PER_OCTAVE), octaves + EXPONENTS[0])
    return np.concatenate([-magnitudes[::-1], [0.0], magnitudes])


CENTERS = _centers()
"""Value of each bucket, which stands for all values in it."""

EDGES = np.concatenate([[-np.inf], (CENTERS[:-1] + CENTERS[1:]) / 2, [np.inf]])
"""Edges between buckets."""


class Histogram:
    """Counts of values by size; count, minimum and maximum are exact, and other statistics follow from the buckets.

    A quantile has a relative error of at most 1/64 (1.6 %), for magnitudes from 5e-20 to 3e38; so have mean and sum of
    values of one sign. Values that are a multiple of 1/64 of the power of two above them have no error, such as all
    integers up to 64, halves up to 32 and quarters up to 16. NaN and infinite values are counted separately.
    """

    def __init__(self) -> None:
        """Create an empty histogram."""
        self._counts = np.zeros(2 * NUM_KEYS + 1, dtype=np.int64)
        self._min = math.inf
        self._max = -math.inf
        self._num_nonfinite = 0

    @property
    def count(self) -> int:
        """Number of finite values."""
        return int(self._counts.sum())

    @property
    def num_nonfinite(self) -> int:
        """Number of NaN and infinite values; all other statistics exclude them."""
        return self._num_nonfinite

    @property
    def sum(self) -> float:
        """The sum of the finite values, within the accuracy of the buckets."""
        (places,) = np.nonzero(self._counts)
        with np.errstate(over="ignore"):
            return float(self._counts[places] @ CENTERS[places].clip(self._min, self._max))

    @property
    def mean(self) -> float:
        """The mean, within the accuracy of the buckets; NaN without values."""
        return self.sum / self.count if self.count else math.nan

    @property
    def min(self) -> float:
        """The smallest value; NaN without values."""
        return self._min if self.count else math.nan

    @property
    def max(self) -> float:
        """The largest value; NaN without values."""
        return self._max if self.count else math.nan

    def add(self, values: ArrayLike) -> None:
        """Count values.

        Args:
            values: Numbers in an array of any shape.

        Raises:
            DataError: A value is not a number.
        """
        try:
            numbers = np.asarray(values, dtype=np.float64).ravel()
        except (TypeError, ValueError) as error:
            raise DataError(f"a histogram counts numbers; found {str(values)[:80]}.") from error
        finite = numbers[np.isfinite(numbers)]
        self._num_nonfinite += len(numbers) - len(finite)
        if len(finite):
            self._counts += np.bincount(_keys(finite) + NUM_KEYS, minlength=len(self._counts))
            self._min, self._max = min(self._min, float(finite.min())), max(self._max, float(finite.max()))

    def merge(self, other: "Histogram") -> None:
        """Add the values of another histogram."""
        self._counts += other._counts
        self._min, self._max = min(self._min, other._min), max(self._max, other._max)
        self._num_nonfinite += other._num_nonfinite

    def quantile(self, q: float) -> float:
        """Return the value of rank q * (count - 1) within the accuracy of the buckets; NaN without values.

        Args:
            q: Quantile from 0, the minimum, to 1, the maximum; both are exact.

        Raises:
            DataError: q is outside [0, 1].
        """
        if not 0 <= q <= 1:
            raise DataError(f"a quantile must be in [0, 1]; found {q}.")
        count = self.count
        if not count or q in (0, 1):
            return self.max if q == 1 else self.min
        place = np.searchsorted(np.cumsum(self._counts), math.floor(q * (count - 1)), side="right")
        return float(CENTERS[place].clip(self._min, self._max))

    def bins(self, limit: int = 30) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return bins for plots, of equal width as far as buckets allow, with exact counts.

        Args:
            limit: Maximum number of bins, at least 1.

        Returns:
            [B + 1] increasing edges from the smallest to the largest value, and [B] counts; both empty without values.
        """
        if not self.count:
            return np.empty(0), np.empty(0, dtype=np.int64)
        (places,) = np.nonzero(self._counts)
        lows, highs = (EDGES[places + side].clip(self._min, self._max) for side in (0, 1))
        low, high = self._min, self._max
        if low == high:
            low, high = low - 0.5, high + 0.5  # as numpy does for a single value
        if not low < high:
            low, high = np.nextafter(self._min, -math.inf), np.nextafter(self._max, math.inf)
        shares = np.linspace(0.0, 1.0, limit + 1)[:-1]
        edges = low * (1 - shares) + high * shares  # high - low may overflow
        at = np.searchsorted(highs, edges, side="left").clip(0, len(places) - 1)
        edges = np.where(lows[at] < edges, highs[at], edges)  # no edge within a bucket
        edges = np.unique([low, *edges.clip(low, high), high])
        middles = lows / 2 + highs / 2
        at = (np.searchsorted(edges, middles, side="right") - 1).clip(0, len(edges) - 2)
        return edges, np.bincount(at, weights=self._counts[places]).astype(np.int64)

    def to_json(self) -> dict[str, Json]:
        """Return the exact state as JSON values; equal for equal values, however they were split."""
        (places,) = np.nonzero(self._counts)
        return {
            "per_octave": PER_OCTAVE,
            "count": self.count,
            "min": self._min if len(places) else None,
            "max": self._max if len(places) else None,
            "nonfinite": self._num_nonfinite,
            "keys": (places - NUM_KEYS).tolist(),
            "counts": self._counts[places].tolist(),
        }

    @classmethod
    def from_json(cls, state: object) -> "Histogram":
        """Restore a histogram from `to_json`.

        Raises:
            DataError: The value is not a histogram's JSON.
        """
        histogram = cls()
        try:
            read = msgspec.convert(state, _State)
            histogram._counts[np.array(read.keys, dtype=np.int64) + NUM_KEYS] = read.counts
        except (ValueError, LookupError, OverflowError) as error:  # msgspec's errors are ValueErrors
            raise DataError(f"a histogram must be an object of Histogram.to_json; {error}.") from error
        histogram._num_nonfinite = read.nonfinite
        if read.min is not None and read.max is not None:
            histogram._min, histogram._max = read.min, read.max
        return histogram


class _State(msgspec.Struct, frozen=True):
    """Format of a histogram as JSON."""

    per_octave: Literal[32]
    min: float | None
    max: float | None
    nonfinite: int
    keys: list[int]
    counts: list[int]


def _keys(values: Array) -> Array:
    """Return the keys of finite values; IEEE arithmetic gives the same ones on every machine."""
    mantissas, exponents = np.frexp(np.abs(values))
    keys = PER_OCTAVE * (exponents - EXPONENTS[0]) + np.rint(2 * PER_OCTAVE * mantissas) - (PER_OCTAVE - 1)
    signed: Array = (np.sign(values) * keys.clip(0, NUM_KEYS)).astype(np.int64)
    return signed
