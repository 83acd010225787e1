"""Batches of rows in columns: dense arrays, or ragged ones as flat values with offsets."""

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_core.annotation_rules import array_of, expect, several
from rl_core.data.columns import BUILT_IN, column_dtype, column_spec
from rl_core.data.ragged import Array, Ragged, offsets_of, row_indices
from rl_core.data.records import ImageSpan, Json, Trajectory
from rl_core.data.row_keys import RowKey, RowKeys
from rl_core.errors import DataError, ShapeError

if TYPE_CHECKING:
    import torch


Column = Array | Ragged

IMAGES = "images"
"""Name of the images among a row's extras."""


class Batch:
    """Rows in named columns. Batches are immutable, so views can be handed out without copies."""

    __slots__ = ("__weakref__", "_columns", "_extras", "keys")

    def __init__(
        self,
        keys: Sequence[RowKey],
        columns: Mapping[str, Column],
        *,
        extras: Sequence[Mapping[str, Json]] | None = None,
    ) -> None:
        """Check and store the columns.

        Args:
            keys: Identity of each row.
            columns: Declared columns by name, each with len(keys) rows. A column of another dtype is converted if only
                rounding of floats changes values.
            extras: One JSON object per row.

        Raises:
            DataError: A column is not declared, or a row appears twice.
            ShapeError: A column has the wrong kind, dtype or number of rows, or the row lengths of ragged columns
                differ.
        """
        self.keys = RowKeys.of(keys)
        self.keys.check_unique()
        self.keys.check_outputs()
        if extras is not None and len(extras) != len(self.keys):
            raise ShapeError(f"extras must have {len(self.keys)} rows; found {len(extras)}.")
        for key, extra in zip(self.keys, extras or (), strict=False):
            if not isinstance(extra, Mapping):
                raise DataError(f"extras of row {tuple(key)} must be a JSON object; found {type(extra).__name__}.")
        self._extras = tuple(extras) if extras is not None and any(extras) else None
        self._columns = fitting_columns(columns, num_rows=len(self.keys))
        check_alignment(self._columns)

    @classmethod
    def _of(
        cls, keys: RowKeys, columns: Mapping[str, Column], extras: tuple[Mapping[str, Json], ...] | None
    ) -> "Batch":
        """Build a batch from checked parts."""
        self = cls.__new__(cls)
        self.keys, self._columns, self._extras = keys, dict(columns), extras
        return self

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[Trajectory]) -> "Batch":
        """Build the columns from trajectories, in order; a missing reward or baseline becomes NaN, missing indices -1.

        Raises:
            ShapeError: Trajectories differ in the number of expert layers, experts or kept ids per token.
        """
        trajectories = several(trajectories, Trajectory, "trajectories")
        token_columns = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
        values = {
            name: np.concatenate([np.empty(0, dtype=column_dtype(name)), *(getattr(t, name) for t in trajectories)])
            for name in token_columns
        }
        offsets = offsets_of([len(t.input_ids) for t in trajectories])
        for name in ("routed_experts", "nucleus_ids"):
            if (indices := _indices_of(trajectories, name)) is not None:
                values[name] = indices
        columns: dict[str, Column] = {**Ragged.aligned(values, offsets)}
        rewards = [np.nan if t.reward is None else t.reward for t in trajectories]
        columns["reward"] = np.asarray(rewards, dtype=np.float32)
        if any(t.reward_baseline is not None for t in trajectories):
            baselines = [np.nan if t.reward_baseline is None else t.reward_baseline for t in trajectories]
            columns["reward_baseline"] = np.asarray(baselines, dtype=np.float32)
        columns["is_truncated"] = np.asarray([t.finish_reason == "length" for t in trajectories], dtype=np.bool_)
        columns["num_prompt_tokens"] = np.asarray([t.num_prompt_tokens for t in trajectories], dtype=np.int32)
        keys = [RowKey(t.prompt_uid, t.session_index, t.output_index) for t in trajectories]
        return cls(keys, columns, extras=[{**t.extras, **image_extras(t.images)} for t in trajectories])

    @classmethod
    def concat(cls, batches: Iterable["Batch"]) -> "Batch":
        """Concatenate batches that have the same columns."""
        batches = several(batches, Batch, "batches")
        if not batches:
            return cls((), {})
        names = batches[0].names
        for batch in batches[1:]:
            if batch.names != names:
                raise DataError(f"batches to join must have the same columns; {sorted(names ^ batch.names)} differ.")
        columns = {name: concat_columns([batch[name] for batch in batches]) for name in batches[0]._columns}
        keys = RowKeys.concat([batch.keys for batch in batches])
        keys.check_unique()
        has_extras = any(batch._extras is not None for batch in batches)
        extras = tuple(extra for batch in batches for extra in batch.extras) if has_extras else None
        return cls._of(keys, columns, extras)

    @property
    def extras(self) -> tuple[Mapping[str, Json], ...]:
        """One JSON object per row."""
        return ({},) * len(self) if self._extras is None else self._extras

    @property
    def images(self) -> tuple[tuple[ImageSpan, ...], ...]:
        """The images among each row's tokens, in their order.

        Raises:
            DataError: A row's extras have something else as "images".
        """
        return tuple(map(_images_of, self.extras))

    @property
    def names(self) -> frozenset[str]:
        """Names of the columns."""
        return frozenset(self._columns)

    @property
    def size_bytes(self) -> int:
        """Size of all columns in bytes."""
        return sum(column.nbytes for column in self._columns.values())

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{name} {'ragged ' if isinstance(column, Ragged) else ''}{column.dtype}"
            f"{list(column.element_shape if isinstance(column, Ragged) else column.shape[1:]) or ''}"
            for name, column in self._columns.items()
        )
        return f"Batch({len(self)} rows of {len(np.unique(self.keys.prompts))} prompts: {columns or 'no columns'})"

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Column:
        """Return a column by name.

        Raises:
            DataError: There is no such column.
        """
        try:
            return self._columns[name]
        except KeyError:
            raise DataError(f"the batch has no column {name!r}; it has {sorted(self._columns)}.") from None

    def dense(self, name: str) -> Array:
        """Return a dense column, [N, ...]."""
        column = self[name]
        if isinstance(column, Ragged):
            raise ShapeError(f"column {name!r} is ragged; expected a dense one.")
        return column

    def ragged(self, name: str) -> Ragged:
        """A ragged column."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise ShapeError(f"column {name!r} is dense; a ragged one was expected.")
        return column

    def tensor(self, name: str) -> "torch.Tensor":
        """Return a column as a torch tensor on the same memory. Do not write to it: rows from a queue may be shared."""
        import torch

        column = self[name]
        values = np.ascontiguousarray(column.values if isinstance(column, Ragged) else column)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(values)

    def with_columns(self, columns: Mapping[str, Column]) -> "Batch":
        """Return a batch with columns added or replaced; the other columns are shared."""
        merged = {**self._columns, **fitting_columns(columns, num_rows=len(self))}
        check_alignment(merged)
        return Batch._of(self.keys, merged, self._extras)

    def with_extras(self, extras: Sequence[Mapping[str, Json]]) -> "Batch":
        """Return a batch with other extras; columns are shared.

        Raises:
            ShapeError: The number of extras is not the number of rows.
        """
        if len(extras) != len(self):
            raise ShapeError(f"extras must have {len(self)} rows; found {len(extras)}.")
        return Batch._of(self.keys, self._columns, tuple(extras))

    def only(self, names: Set[str]) -> "Batch":
        """Return a batch with only these columns, which are shared.

        Raises:
            DataError: A column is missing.
        """
        for name in names:
            self[name]
        kept = {name: column for name, column in self._columns.items() if name in names}
        return Batch._of(self.keys, kept, self._extras)

    def select(self, rows: ArrayLike) -> "Batch":
        """Return the rows at these indices, in this order.

        Raises:
            ShapeError: The indices are not integers; turn a mask into them with `np.flatnonzero`.
            IndexError: An index is out of range.
            DataError: A row is selected twice.
        """
        indices = row_indices(rows, num_rows=len(self))
        columns: dict[str, Column] = {
            name: column.select(indices) if isinstance(column, Ragged) else column[_as_slice(indices)]
            for name, column in self._columns.items()
        }
        extras = None if self._extras is None else tuple(self._extras[i] for i in indices)
        keys = self.keys.select(indices)
        if not bool((indices[1:] > indices[:-1]).all()):
            keys.check_unique()
        return Batch._of(keys, columns, extras)

    def split(self, sizes: Sequence[int]) -> list["Batch"]:
        """Split the rows into consecutive batches of these sizes; ragged values are shared.

        Raises:
            ShapeError: The sizes do not add up to the number of rows.
        """
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise ShapeError(f"sizes must add up to {len(self)} rows; found {list(sizes)}.")
        ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
        return [self.select(np.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def group_index(self) -> NDArray[np.int64]:
        """[N] index of each row's prompt, numbered by first appearance."""
        return self.keys.by_first_appearance()


def _indices_of(trajectories: Sequence[Trajectory], name: str) -> Array | None:
    """[T, ...] indices of all tokens, -1 where a trajectory has none; None if no trajectory has any."""
    given = [(len(one.input_ids), getattr(one, name)) for one in trajectories]
    shapes = {indices.shape[1:] for _, indices in given if indices is not None}
    if len(shapes) > 1:
        raise ShapeError(f"{name} must have one shape per token in all trajectories; found {sorted(shapes)}.")
    dtype = column_dtype(name)
    filled = [
        np.full((length, *shape), -1, dtype) if indices is None else indices
        for shape in shapes
        for length, indices in given
    ]
    return np.concatenate(filled) if filled else None


def _as_slice(indices: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """A consecutive range of rows as a slice, without copying."""
    if len(indices) and bool((indices[1:] == indices[:-1] + 1).all()):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices


def fitting_columns(columns: Mapping[str, Column], *, num_rows: int) -> dict[str, Column]:
    """Check columns against their declarations.

    Raises:
        DataError: A name is missing or not declared.
        ShapeError: A column has the wrong kind or number of rows, or values that its dtype cannot represent.
    """
    expect(columns, "columns", Mapping)
    return {name: _fitting(name, column, num_rows=num_rows) for name, column in columns.items()}


def _fitting(name: str, column: Column, *, num_rows: int) -> Column:
    spec, who = column_spec(name), f"column {name!r}"
    if spec.is_ragged != isinstance(column, Ragged):
        kind = "ragged, a Ragged" if spec.is_ragged else "dense, a numpy array"
        raise ShapeError(f"{who} must be {kind} of {spec.dtype}; found {type(column).__name__}.")
    if isinstance(column, Ragged):
        if column.dtype != spec.dtype:
            column = Ragged(array_of(column.values, who=who, dtype=spec.dtype), column.offsets)
    elif type(column) is not np.ndarray or column.dtype != spec.dtype:
        column = array_of(column, who=who, dtype=spec.dtype)
    if (not isinstance(column, Ragged) and not column.ndim) or len(column) != num_rows:
        found = len(column) if isinstance(column, Ragged) or column.ndim else "a single number"
        raise ShapeError(f"{who} must have {num_rows} rows; found {found}.")
    element = column.element_shape if isinstance(column, Ragged) else column.shape[1:]
    if name in BUILT_IN and spec.value_axes is not None and len(element) != spec.value_axes:
        value = f"a value of {spec.value_axes} axes" if spec.value_axes else "one value"
        raise ShapeError(f"{who} must have {value} a {'token' if spec.is_ragged else 'row'}; found {element}.")
    return column


def check_alignment(columns: Mapping[str, Column]) -> None:
    """Check that the rows of all ragged columns have equal lengths.

    Raises:
        ShapeError: Two columns differ; names the first such row.
    """
    ragged = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    first = "input_ids" if "input_ids" in ragged else next(iter(ragged), "")
    for name, column in ragged.items():
        if column.lengths is ragged[first].lengths:
            continue
        differs = column.lengths != ragged[first].lengths
        if differs.any():
            row = int(np.argmax(differs))
            raise ShapeError(
                f"row {row} of column {name!r} must be as long as in {first!r}, {ragged[first].lengths[row]} tokens; "
                f"found {column.lengths[row]}."
            )


def concat_columns(columns: Sequence[Column]) -> Column:
    """Concatenate columns of one kind; ragged values are not copied.

    Raises:
        ShapeError: The elements' shapes differ.
    """
    if isinstance(columns[0], Ragged):
        return Ragged.concat([column for column in columns if isinstance(column, Ragged)])
    dense = [column for column in columns if not isinstance(column, Ragged)]
    shapes = {column.shape[1:] for column in dense}
    if len(shapes) > 1:
        raise ShapeError(f"dense columns to join must have one shape besides their rows; found {sorted(shapes)}.")
    return np.concatenate(dense)


def image_extras(images: Iterable[ImageSpan]) -> dict[str, Json]:
    """Return the extras of a row with images among its tokens; empty without images."""
    found = [[one.digest, one.start, one.length] for one in images]
    return {IMAGES: found} if found else {}


def _images_of(extras: Mapping[str, Json]) -> tuple[ImageSpan, ...]:
    found = extras.get(IMAGES, [])
    try:
        return tuple(ImageSpan(digest=digest, start=start, length=length) for digest, start, length in found)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"extras[{IMAGES!r}] must be a list of [digest, start, length]; found {str(found)[:80]}."
        ) from error
