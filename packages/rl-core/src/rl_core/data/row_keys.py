"""Keys of rows as arrays, so that selecting or joining thousands of rows does not process each one."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from rl_core.data.ragged import Index
from rl_core.errors import DataError
from rl_core.record_fields import record_tuple

Int32s = NDArray[np.int32]


@record_tuple
class RowKey(NamedTuple):
    """Key of a row: prompt, session and output."""

    prompt_uid: str
    session_index: int
    output_index: int


class RowKeys(Sequence[RowKey]):
    """Keys of rows; reads like a tuple of `RowKey`.

    Attributes:
        uids: Distinct prompts that rows may belong to.
        prompts: [N] int32 index of each row's prompt in `uids`.
        sessions: [N] int32 session indices.
        outputs: [N] int32 output indices.
    """

    __slots__ = ("outputs", "prompts", "sessions", "uids")

    def __init__(self, uids: tuple[str, ...], prompts: Int32s, sessions: Int32s, outputs: Int32s) -> None:
        """Store keys that `Batch` or `segment` has checked."""
        self.uids, self.prompts, self.sessions, self.outputs = uids, prompts, sessions, outputs

    @classmethod
    def of(cls, keys: Sequence[RowKey]) -> "RowKeys":
        """Build keys from any sequence.

        Raises:
            DataError: An entry is not a key, or an index does not fit in 32 bits.
        """
        if isinstance(keys, RowKeys):
            return keys
        try:
            keys = [key if type(key) is RowKey else RowKey(*key) for key in keys]
        except TypeError as error:
            raise DataError(
                f"keys of rows must be RowKey(prompt_uid, session_index, output_index): {error}."
            ) from error
        numbers: dict[str, int] = {}
        prompts = np.asarray([numbers.setdefault(uid, len(numbers)) for uid, _, _ in keys], dtype=np.int32)
        try:
            sessions = np.asarray([session for _, session, _ in keys], dtype=np.int32)
            outputs = np.asarray([output for _, _, output in keys], dtype=np.int32)
        except OverflowError as error:
            far = next(key for key in keys if not all(-(2**31) <= index < 2**31 for index in key[1:]))
            raise DataError(f"indices of sessions and outputs must fit in int32; found row {tuple(far)}.") from error
        return cls(tuple(numbers), prompts, sessions, outputs)

    @classmethod
    def concat(cls, parts: Sequence["RowKeys"]) -> "RowKeys":
        """Concatenate keys."""
        numbers: dict[str, int] = {}
        prompts = []
        for part in parts:
            merged = np.asarray([numbers.setdefault(uid, len(numbers)) for uid in part.uids], dtype=np.int32)
            prompts.append(merged[part.prompts])
        sessions, outputs = [part.sessions for part in parts], [part.outputs for part in parts]
        return cls(tuple(numbers), np.concatenate(prompts), np.concatenate(sessions), np.concatenate(outputs))

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, row: int) -> RowKey: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[RowKey, ...]: ...

    def __getitem__(self, row: int | slice) -> RowKey | tuple[RowKey, ...]:
        """Return one key, or several."""
        if isinstance(row, slice):
            return tuple(self.select(np.arange(len(self))[row]))
        return RowKey(self.uids[self.prompts[row]], int(self.sessions[row]), int(self.outputs[row]))

    def __iter__(self) -> Iterator[RowKey]:
        uids = map(self.uids.__getitem__, self.prompts.tolist())
        return map(RowKey._make, zip(uids, self.sessions.tolist(), self.outputs.tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def compact(self) -> "RowKeys":
        """Return the same keys, with only the uids they use."""
        return self if len(self.uids) <= 1 else self.select(np.arange(len(self)))

    def select(self, rows: Index) -> "RowKeys":
        """Return the keys at these indices, with only their prompts."""
        uids, prompts = self.uids, self.prompts[rows]
        if len(uids) > 1:
            used, numbers = np.unique(prompts, return_inverse=True)
            uids, prompts = tuple(uids[index] for index in used.tolist()), numbers.astype(np.int32)
        return RowKeys(uids, prompts, self.sessions[rows], self.outputs[rows])

    def by_first_appearance(self) -> Index:
        """Return [N] index of each row's prompt, numbered by first appearance."""
        _, firsts, inverse = np.unique(self.prompts, return_index=True, return_inverse=True)
        ranks = np.empty(len(firsts), dtype=np.int64)
        ranks[np.argsort(firsts)] = np.arange(len(firsts))
        numbered: Index = ranks[inverse]
        return numbered

    def in_order(self, groups: Index) -> Index:
        """Return [N] indices that sort rows by group, session and output."""
        order: Index = np.lexsort((self.outputs, self.sessions, groups))
        return order

    def check_outputs(self) -> None:
        """Check that no output index is negative; the queue checks sessions.

        Raises:
            DataError: Names the first row with a negative index.
        """
        is_below = self.outputs < 0
        if is_below.any():
            raise DataError(f"row {tuple(self[int(np.argmax(is_below))])} has an output index below 0.")

    def check_unique(self) -> None:
        """Check that no row appears twice.

        Raises:
            DataError: Names the first repeated row.
        """
        if len(self) < 2:
            return
        order = self.in_order(self.prompts.astype(np.int64))
        columns = (self.prompts[order], self.sessions[order], self.outputs[order])
        is_double = np.all([column[1:] == column[:-1] for column in columns], axis=0)
        if is_double.any():
            double = self[int(order[int(np.argmax(is_double)) + 1])]
            raise DataError(f"row {tuple(double)} appears twice in one batch.")
