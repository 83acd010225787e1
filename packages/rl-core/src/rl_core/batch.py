"""Batches of rows in columns: dense arrays, or ragged ones as flat values with offsets."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_core.columns import column_dtype, column_spec
from rl_core.errors import DataError, ShapeError
from rl_core.records import Json, Trajectory

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]


class RowKey(NamedTuple):
    """Identity of a row: which output of which session of which prompt."""

    prompt_uid: str
    session_index: int
    output_index: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths, stored end to end.

    Attributes:
        values: [sum of lengths] the rows, one after the other.
        offsets: [N + 1] int64; row i is values[offsets[i]:offsets[i + 1]].
    """

    values: Array
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Check that the offsets start at 0, never fall, and end at len(values)."""
        offsets = self.offsets
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(self.values):
            raise ShapeError(
                f"offsets must run from 0 to len(values) = {len(self.values)}; found shape {list(offsets.shape)}"
                + (f", {offsets[0]} to {offsets[-1]}." if offsets.ndim == 1 and len(offsets) else ".")
            )
        if len(offsets) > 1 and bool((np.diff(offsets) < 0).any()):
            raise ShapeError("offsets must never fall; found a negative row length.")

    @classmethod
    def from_rows(cls, rows: Sequence[ArrayLike], *, dtype: Any) -> "Ragged":
        """Join rows, copying them once."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls(values, offsets_of([len(row) for row in arrays]))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] length of each row."""
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        """View of one row; negative ones count from the end.

        Raises:
            IndexError: There is no such row.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row must be below {len(self)}, the number of rows; found {row}.")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    def select(self, rows: ArrayLike) -> "Ragged":
        """The rows at these indices, in this order; a view when they are contiguous.

        Raises:
            ShapeError: The indices are not integers; turn a mask into them with `np.flatnonzero`.
            IndexError: There is no such row.
        """
        indices = row_indices(rows, num_rows=len(self))
        lengths = self.lengths[indices]
        offsets = offsets_of(lengths)
        if len(indices) and bool((np.diff(indices) == 1).all()):
            return Ragged(self.values[self.offsets[indices[0]] : self.offsets[indices[-1] + 1]], offsets)
        return Ragged(self.values[token_positions(self.offsets[indices], lengths)], offsets)


Column = Array | Ragged


def row_indices(rows: ArrayLike, *, num_rows: int) -> NDArray[np.int64]:
    """Indices from 0 of rows, with negative ones counted from the end.

    Raises:
        ShapeError: They are not a 1-D sequence of integers.
        IndexError: One is out of range.
    """
    found = np.asarray(rows)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise ShapeError(
            f"rows must be [M] integers; found {found.dtype} of shape {list(found.shape)}. "
            "Turn a mask into indices with np.flatnonzero."
        )
    indices: NDArray[np.int64] = found.astype(np.int64)
    is_outside = (indices < -num_rows) | (indices >= num_rows)
    if is_outside.any():
        raise IndexError(f"rows must be below {num_rows}, the number of rows; found {indices[is_outside][0]}.")
    indices[indices < 0] += num_rows
    return indices


def offsets_of(lengths: ArrayLike) -> NDArray[np.int64]:
    """[N + 1] offsets of rows with these lengths."""
    array = np.asarray(lengths, dtype=np.int64)
    offsets: NDArray[np.int64] = np.zeros(len(array) + 1, dtype=np.int64)
    np.cumsum(array, out=offsets[1:])
    return offsets


def token_positions(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Flat positions of rows that begin at `starts` and have `lengths`."""
    total = int(lengths.sum())
    shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    positions: NDArray[np.int64] = np.arange(total, dtype=np.int64) + shift
    return positions


class Batch:
    """Rows in named columns; immutable, so that views can be handed out without copies."""

    __slots__ = ("_columns", "extras", "keys")

    def __init__(
        self,
        keys: Sequence[RowKey],
        columns: Mapping[str, Column],
        *,
        extras: Sequence[Mapping[str, Json]] | None = None,
    ) -> None:
        """Check and hold the columns.

        Args:
            keys: Identity of each row.
            columns: Known columns by name, each with len(keys) rows.
            extras: JSON of each row.

        Raises:
            DataError: A column is unknown, or a row appears twice.
            ShapeError: A column has the wrong kind, dtype or number of rows, or ragged columns differ in the
                lengths of their rows.
        """
        self.keys = tuple(keys)
        if len(set(self.keys)) != len(self.keys):
            seen: set[RowKey] = set()
            double = next(key for key in self.keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise DataError(f"row {tuple(double)} appears twice in one batch.")
        self.extras = tuple(extras) if extras is not None else ({},) * len(self.keys)
        if len(self.extras) != len(self.keys):
            raise ShapeError(f"extras must have {len(self.keys)} rows; found {len(self.extras)}.")
        for name, column in columns.items():
            check_column(name, column, num_rows=len(self.keys))
        check_alignment(columns)
        self._columns = dict(columns)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> "Batch":
        """Columns of trajectories, in their order; a missing reward becomes NaN."""
        token_columns = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
        columns: dict[str, Column] = {
            name: Ragged.from_rows([getattr(t, name) for t in trajectories], dtype=column_dtype(name))
            for name in token_columns
        }
        rewards = [np.nan if t.reward is None else t.reward for t in trajectories]
        columns["reward"] = np.asarray(rewards, dtype=np.float32)
        columns["is_truncated"] = np.asarray([t.finish_reason == "length" for t in trajectories], dtype=np.bool_)
        columns["num_prompt_tokens"] = np.asarray([t.num_prompt_tokens for t in trajectories], dtype=np.int32)
        keys = [RowKey(t.prompt_uid, t.session_index, t.output_index) for t in trajectories]
        return cls(keys, columns, extras=[t.extras for t in trajectories])

    @classmethod
    def concat(cls, batches: Sequence["Batch"]) -> "Batch":
        """All rows of batches that have the same columns."""
        if not batches:
            return cls((), {})
        names = batches[0].names
        for batch in batches[1:]:
            if batch.names != names:
                raise DataError(f"batches to join must have the same columns; {sorted(names ^ batch.names)} differ.")
        columns = {name: concat_columns([batch[name] for batch in batches]) for name in batches[0]._columns}
        return cls(
            [key for batch in batches for key in batch.keys],
            columns,
            extras=[extra for batch in batches for extra in batch.extras],
        )

    @property
    def names(self) -> frozenset[str]:
        """Names of the columns."""
        return frozenset(self._columns)

    @property
    def size_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(
            column.values.nbytes + column.offsets.nbytes if isinstance(column, Ragged) else column.nbytes
            for column in self._columns.values()
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Column:
        """A column by name.

        Raises:
            DataError: The batch has no such column.
        """
        try:
            return self._columns[name]
        except KeyError:
            raise DataError(f"the batch has no column {name!r}; it has {sorted(self._columns)}.") from None

    def dense(self, name: str) -> Array:
        """A dense column, [N, ...]."""
        column = self[name]
        if isinstance(column, Ragged):
            raise ShapeError(f"column {name!r} is ragged; a dense one was expected.")
        return column

    def ragged(self, name: str) -> Ragged:
        """A ragged column."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise ShapeError(f"column {name!r} is dense; a ragged one was expected.")
        return column

    def tensor(self, name: str) -> "torch.Tensor":
        """Values of a column as a torch tensor on the same memory."""
        import torch

        column = self[name]
        values = column.values if isinstance(column, Ragged) else column
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def with_columns(self, columns: Mapping[str, Column]) -> "Batch":
        """A batch with these columns added or replaced, sharing the others."""
        return Batch(self.keys, {**self._columns, **columns}, extras=self.extras)

    def only(self, names: Set[str]) -> "Batch":
        """A batch with these columns alone, sharing them.

        Raises:
            DataError: The batch lacks one of them.
        """
        for name in names:
            self[name]
        kept = {name: column for name, column in self._columns.items() if name in names}
        return Batch(self.keys, kept, extras=self.extras)

    def select(self, rows: ArrayLike) -> "Batch":
        """The rows at these indices, in this order.

        Raises:
            ShapeError: The indices are not integers; turn a mask into them with `np.flatnonzero`.
            IndexError: There is no such row.
        """
        indices = row_indices(rows, num_rows=len(self))
        columns: dict[str, Column] = {
            name: column.select(indices) if isinstance(column, Ragged) else column[indices]
            for name, column in self._columns.items()
        }
        return Batch([self.keys[i] for i in indices], columns, extras=[self.extras[i] for i in indices])

    def group_index(self) -> NDArray[np.int64]:
        """[N] index of each row's prompt, numbered by first appearance."""
        order: dict[str, int] = {}
        return np.asarray([order.setdefault(key.prompt_uid, len(order)) for key in self.keys], dtype=np.int64)


def check_column(name: str, column: Column, *, num_rows: int) -> None:
    """Refuse a column that is not as its table entry says.

    Raises:
        DataError: The name is unknown.
        ShapeError: Wrong kind, dtype or number of rows.
    """
    spec = column_spec(name)
    if spec.is_ragged != isinstance(column, Ragged):
        raise ShapeError(f"column {name!r} must be {'ragged' if spec.is_ragged else 'dense'}; it is not.")
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype != np.dtype(spec.dtype):
        raise ShapeError(f"column {name!r} must have dtype {spec.dtype}; found {values.dtype}.")
    if len(column) != num_rows:
        raise ShapeError(f"column {name!r} must have {num_rows} rows; found {len(column)}.")


def check_alignment(columns: Mapping[str, Column]) -> None:
    """Refuse ragged columns whose rows differ in length, token for token.

    Raises:
        ShapeError: Two columns disagree; the message names the first such row.
    """
    ragged = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    first = "input_ids" if "input_ids" in ragged else next(iter(ragged), "")
    for name, column in ragged.items():
        differs = column.lengths != ragged[first].lengths
        if differs.any():
            row = int(np.argmax(differs))
            raise ShapeError(
                f"row {row} of column {name!r} must be as long as in {first!r}, {ragged[first].lengths[row]} tokens; "
                f"found {column.lengths[row]}."
            )


def concat_columns(columns: Sequence[Column]) -> Column:
    """Join columns of one kind, row after row."""
    if isinstance(columns[0], Ragged):
        ragged = [column for column in columns if isinstance(column, Ragged)]
        lengths = np.concatenate([column.lengths for column in ragged])
        return Ragged(np.concatenate([column.values for column in ragged]), offsets_of(lengths))
    return np.concatenate([column for column in columns if not isinstance(column, Ragged)])
