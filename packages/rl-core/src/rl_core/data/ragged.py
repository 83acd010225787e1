"""Rows of different lengths, over pieces of memory that may be separate."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_core.annotation_rules import array_of
from rl_core.errors import ShapeError

Array = NDArray[Any]
Index = NDArray[np.int64]


class _RowLayout(NamedTuple):
    """Location of rows: piece number (None with a single piece) and start of each, and offsets if contiguous."""

    pieces: tuple[Array, ...]
    piece: Index | None
    starts: Index
    offsets: Index | None


class Ragged:
    """Rows of different lengths; immutable.

    `select` and `concat` do not copy values; they record where each row is. Reading a row returns a view. `values`
    makes the rows contiguous once, if they are not yet; until then a selection keeps the memory of its source alive.
    """

    __slots__ = ("_layout", "_lengths")

    def __init__(self, values: ArrayLike, offsets: ArrayLike) -> None:
        """Store contiguous rows.

        Args:
            values: [sum of lengths, ...] rows, one after the other.
            offsets: [N + 1] int64; row i is values[offsets[i]:offsets[i + 1]].

        Raises:
            ShapeError: The offsets do not start at 0, decrease, or do not end at len(values).
        """
        values = array_of(values, who="values of Ragged")
        offsets = offsets if isinstance(offsets, np.ndarray) else array_of(offsets, who="offsets", dtype=np.int64)
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(values):
            raise ShapeError(
                f"offsets must run from 0 to len(values) = {len(values)}; found shape {list(offsets.shape)}"
                + (f", {offsets[0]} to {offsets[-1]}." if offsets.ndim == 1 and len(offsets) else ".")
            )
        if offsets.dtype != np.int64:
            raise ShapeError(f"offsets must have dtype int64; found {offsets.dtype}.")
        lengths = offsets[1:] - offsets[:-1]
        if len(lengths) and int(lengths.min()) < 0:
            raise ShapeError("offsets must not decrease; found a negative row length.")
        self._layout = _RowLayout((values,), None, offsets[:-1], offsets)
        self._lengths: Index = lengths

    @classmethod
    def from_rows(cls, rows: Sequence[ArrayLike], *, dtype: Any) -> "Ragged":
        """Build from separate rows, copying them once."""
        arrays = [array_of(row, who=f"row {index} of Ragged", dtype=dtype) for index, row in enumerate(rows)]
        if any(not array.ndim for array in arrays):
            raise ShapeError("rows must each be a list or an array; found a single number. Pass a list of rows.")
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls(values, offsets_of([len(row) for row in arrays]))

    @classmethod
    def concat(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """Concatenate without copying.

        Raises:
            ShapeError: There are no parts, or they differ in dtype or element shape.
        """
        if not parts:
            raise ShapeError("parts must be at least one Ragged; found none.")
        if len(parts) == 1:
            return parts[0]
        layouts = [part._layout for part in parts]  # read once: another thread may make the rows contiguous
        kinds = {(layout.pieces[0].dtype, layout.pieces[0].shape[1:]) for layout in layouts}
        if len(kinds) > 1:
            raise ShapeError(f"ragged columns to join must have one dtype and shape; found {sorted(map(str, kinds))}.")
        known: dict[int, int] = {}
        pieces: list[Array] = []
        numbers: list[Index] = []
        for part, layout in zip(parts, layouts, strict=True):
            for array in layout.pieces:
                if known.setdefault(id(array), len(pieces)) == len(pieces):
                    pieces.append(array)
            own = np.asarray([known[id(array)] for array in layout.pieces], dtype=np.int64)
            numbers.append(np.broadcast_to(own, len(part)) if layout.piece is None else own[layout.piece])
        starts = np.concatenate([layout.starts for layout in layouts])
        lengths = np.concatenate([part._lengths for part in parts])
        return cls._over(_RowLayout(tuple(pieces), np.concatenate(numbers), starts, None), lengths)

    @classmethod
    def aligned(cls, values: Mapping[str, Array], offsets: Index) -> dict[str, "Ragged"]:
        """Columns of equal row lengths, by name; checked once."""
        columns: dict[str, Ragged] = {}
        for name, array in values.items():
            if columns and len(array) == offsets[-1]:
                first = next(iter(columns.values()))
                columns[name] = cls._over(_RowLayout((array,), None, offsets[:-1], offsets), first.lengths)
            else:
                columns[name] = cls(array, offsets)
        return columns

    @classmethod
    def _over(cls, layout: _RowLayout, lengths: Index) -> "Ragged":
        """Build from rows anywhere in memory."""
        self = cls.__new__(cls)
        self._layout = layout if len(layout.pieces) > 1 else layout._replace(piece=None)
        self._lengths = lengths
        return self

    @property
    def values(self) -> Array:
        """[sum of lengths, ...] contiguous rows; a view if they already are contiguous."""
        return self._joined().pieces[0]

    @property
    def offsets(self) -> Index:
        """[N + 1] int64; row i is values[offsets[i]:offsets[i + 1]]."""
        offsets = self._layout.offsets
        return offsets_of(self._lengths) if offsets is None else offsets

    @property
    def lengths(self) -> Index:
        """[N] length of each row."""
        return self._lengths

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the values."""
        return self._layout.pieces[0].dtype

    @property
    def element_shape(self) -> tuple[int, ...]:
        """Shape of one element, such as one token's value; () for a number."""
        return self._layout.pieces[0].shape[1:]

    @property
    def width(self) -> int:
        """Size in bytes of one element, such as one token's value."""
        piece = self._layout.pieces[0]
        return math.prod(piece.shape[1:]) * piece.itemsize

    @property
    def nbytes(self) -> int:
        """Size in bytes of the rows and their offsets."""
        return int(self._lengths.sum()) * self.width + 8 * (len(self) + 1)

    def __repr__(self) -> str:
        if not len(self):
            return f"Ragged(no rows, {self.dtype})"
        lengths = f"{self._lengths.min()} to {self._lengths.max()} elements"
        return f"Ragged({len(self)} rows of {lengths}, {self.dtype}{list(self.element_shape) or ''})"

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, row: int) -> Array:
        """Return a view of one row; negative indices count from the end.

        Raises:
            IndexError: The index is out of range.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row must be below {len(self)}, the number of rows; found {row}.")
        pieces, piece, starts, _ = self._layout
        start = int(starts[row])
        return pieces[0 if piece is None else int(piece[row])][start : start + int(self._lengths[row])]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    def runs(self) -> Iterator[Array]:
        """Values in the fewest views, one per contiguous range of rows."""
        if not len(self):
            return
        pieces, piece, starts, offsets = self._layout
        if offsets is not None:
            yield pieces[0]
            return
        follows = starts[1:] == starts[:-1] + self._lengths[:-1]
        if piece is not None:
            follows &= piece[1:] == piece[:-1]
        bounds = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(self)]
        for first, end in itertools.pairwise(bounds):
            array = pieces[0 if piece is None else int(piece[first])]
            yield array[int(starts[first]) : int(starts[end - 1] + self._lengths[end - 1])]

    def select(self, rows: ArrayLike) -> "Ragged":
        """Return the rows at these indices, in this order, without copying.

        Raises:
            ShapeError: The indices are not integers; turn a mask into them with `np.flatnonzero`.
            IndexError: An index is out of range.
        """
        indices = row_indices(rows, num_rows=len(self))
        pieces, piece, starts, _ = self._layout
        piece = None if piece is None else piece[indices]
        return Ragged._over(_RowLayout(pieces, piece, starts[indices], None), self._lengths[indices])

    def _joined(self) -> _RowLayout:
        """Make the rows contiguous, if they are not; later reads use the result."""
        if self._layout.offsets is None:
            runs = list(self.runs())
            values = runs[0] if len(runs) == 1 else np.concatenate(runs or [self._layout.pieces[0][:0]])
            offsets = offsets_of(self._lengths)
            self._layout = _RowLayout((values,), None, offsets[:-1], offsets)  # at once: other threads may read
        return self._layout


def row_indices(rows: ArrayLike, *, num_rows: int) -> Index:
    """Return row indices from 0, with negative ones counted from the end.

    Raises:
        ShapeError: They are not a 1-D sequence of integers.
        IndexError: An index is out of range.
    """
    found = np.asarray(rows)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise ShapeError(
            f"rows must be [M] integers; found {found.dtype} of shape {list(found.shape)}. "
            "Turn a mask into indices with np.flatnonzero."
        )
    indices: Index = found.astype(np.int64)
    is_outside = (indices < -num_rows) | (indices >= num_rows)
    if is_outside.any():
        raise IndexError(f"rows must be below {num_rows}, the number of rows; found {indices[is_outside][0]}.")
    indices[indices < 0] += num_rows
    return indices


def offsets_of(lengths: ArrayLike) -> Index:
    """Return [N + 1] offsets of rows with these lengths."""
    array = np.asarray(lengths, dtype=np.int64)
    offsets: Index = np.zeros(len(array) + 1, dtype=np.int64)
    np.cumsum(array, out=offsets[1:])
    return offsets


def token_positions(starts: Index, lengths: Index) -> Index:
    """Return flat positions of rows that start at `starts` and have `lengths`."""
    total = int(lengths.sum())
    shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    positions: Index = np.arange(total, dtype=np.int64) + shift
    return positions
