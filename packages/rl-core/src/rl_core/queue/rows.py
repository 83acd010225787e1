"""Rows that enter or leave a queue: their storage, checks, order and joining."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from rl_core.data.batch import Batch, Column, concat_columns
from rl_core.data.ragged import Array, Ragged
from rl_core.data.records import Trajectory
from rl_core.data.segment import plan_segment
from rl_core.errors import DataError
from rl_core.queue.messages import Leased, PartInfo

INLINE_BYTES = 1 << 16
"""Maximum size of a segment that is sent inline in its message, without a separate place."""


class Prepared(NamedTuple):
    """A batch that is ready to be written.

    Attributes:
        place: The inlined batch, sent in its message; None if it needs another place.
        size_bytes: Size of the separate place that it otherwise needs.
        plan: Layout for writing it.
    """

    place: Any
    size_bytes: int
    plan: Any


def prepare_segment(batch: Batch) -> Prepared:
    """Plan a batch's layout as a segment, which is inlined in its message if small."""
    plan = plan_segment(batch)
    return Prepared(plan.as_bytes() if plan.size_bytes <= INLINE_BYTES else None, plan.size_bytes, plan)


class Payload(Protocol):
    """Writes and reads rows for a client of a queue.

    Attributes:
        is_slow: True if reads are slow enough to benefit from several threads.
    """

    is_slow: bool

    def prepare(self, batch: Batch) -> Prepared:
        """Plan a batch's layout."""
        ...

    def write(self, prepared: Prepared, place: Any) -> Any:
        """Write a batch to a place; return its new place, or None if the place is unchanged."""
        ...

    def read(self, number: int, place: Any) -> Batch:
        """Read the batch at a place.

        Raises:
            SegmentError: The segment cannot be read; its rows are generated again.
        """
        ...


def check_trajectories(prompt_uid: str, session_index: int, trajectories: Sequence[Trajectory]) -> None:
    """Check for rows of other sessions, duplicate output indices, and non-finite rewards."""
    for row, trajectory in enumerate(trajectories):
        if (trajectory.prompt_uid, trajectory.session_index) != (prompt_uid, session_index):
            raise DataError(
                f"trajectory {row} was put for session {session_index} of prompt {prompt_uid!r}, but belongs to "
                f"session {trajectory.session_index} of prompt {trajectory.prompt_uid!r}."
            )
        if trajectory.reward is not None and not math.isfinite(trajectory.reward):
            raise DataError(
                f"the reward of prompt {prompt_uid!r}, session {session_index}, output {trajectory.output_index} must "
                f"be finite, or None before it is scored; found {trajectory.reward}. If it cannot be computed, call "
                "`fail` for the session."
            )
    indices = [trajectory.output_index for trajectory in trajectories]
    if len(set(indices)) != len(indices):
        raise DataError(
            f"session {session_index} of prompt {prompt_uid!r} must have unique output indices; found {indices}."
        )


def batch_of_session(trajectories: Sequence[Trajectory]) -> Batch:
    """Return trajectories as a batch in output order; the reward column exists only if all have a reward."""
    batch = Batch.from_trajectories(sorted(trajectories, key=lambda trajectory: trajectory.output_index))
    is_scored = all(trajectory.reward is not None for trajectory in trajectories)
    return batch if is_scored else batch.only(batch.names - {"reward"})


def check_finite(batch: Batch) -> None:
    """Check columns for NaN and infinity.

    Raises:
        DataError: A value is not finite; the message names column, row and token.
    """
    for name in batch.names:
        column = batch[name]
        if column.dtype.kind != "f":
            continue
        pieces = column.runs() if isinstance(column, Ragged) else (column,)
        with np.errstate(over="ignore", invalid="ignore"):  # faster than a mask: a finite sum implies finite values
            is_finite = all(math.isfinite(piece.sum()) for piece in pieces)
        if not is_finite:
            _refuse_values(batch, name)


def _refuse_values(batch: Batch, name: str) -> None:
    column = batch[name]
    for key, row in zip(batch.keys, column, strict=True):
        bad = np.argwhere(~np.isfinite(np.atleast_1d(row)))
        if len(bad):
            where = f" at token {int(bad[0][0])}" if isinstance(column, Ragged) else ""
            raise DataError(
                f"{name} of prompt {key.prompt_uid!r}, session {key.session_index}, output {key.output_index} must be "
                f"finite; found {np.atleast_1d(row)[tuple(bad[0])]}{where}. Nothing was stored."
            )


def in_group_order(batch: Batch) -> Batch:
    """Reorder a batch so that each prompt's rows are contiguous, by session and output; prompts keep their order."""
    if len(batch) < 2:
        return batch
    order = batch.keys.in_order(batch.group_index())
    return batch if bool((order == np.arange(len(batch))).all()) else batch.select(order)


def sessions_of(batch: Batch) -> list[tuple[str, list[int]]]:
    """Return each prompt's sessions in a batch in group order."""
    found: dict[str, list[int]] = {}
    uids, prompts, sessions = batch.keys.uids, batch.keys.prompts, batch.keys.sessions
    if len(uids) == 1:
        return [(uids[0], list(dict.fromkeys(sessions.tolist())))]
    is_first = (np.diff(prompts, prepend=-1) != 0) | (np.diff(sessions, prepend=-1) != 0)
    for prompt, session in zip(prompts[is_first].tolist(), sessions[is_first].tolist(), strict=True):
        found.setdefault(uids[prompt], []).append(session)
    return list(found.items())


def describe_parts(batch: Batch) -> list[PartInfo]:
    """Describe each prompt's rows in a batch in group order."""
    if not len(batch):
        return []
    is_one = len(batch.keys.uids) == 1
    firsts = np.zeros(1, np.int64) if is_one else np.flatnonzero(np.diff(batch.keys.prompts, prepend=-1))
    ends = [*firsts[1:].tolist(), len(batch)]
    lengths = _lengths(batch)
    tokens = [int(lengths.sum())] if is_one else np.add.reduceat(lengths, firsts).tolist()
    token_bytes, row_bytes = _widths(batch)
    versions = _versions(batch, firsts)
    uids, prompts = batch.keys.uids, batch.keys.prompts
    return [
        PartInfo(uids[prompts[first]], first, end - first, num, num * token_bytes + (end - first) * row_bytes, *v)
        for first, end, num, v in zip(firsts.tolist(), ends, tokens, versions, strict=True)
    ]


def check_given(batch: Batch, given: Mapping[str, Column]) -> Batch:
    """Return the columns that a task adds, as a separate batch.

    Raises:
        ShapeError: The columns do not match the rows of the lease.
        DataError: A column is unknown, or has non-finite values.
    """
    late = batch.with_columns(given).only(given.keys())
    check_finite(late)
    return late


def join(leased: Leased, read: Callable[[int], Batch]) -> Batch:
    """Read the rows of a lease from their segments.

    Args:
        leased: The leased rows, by segment.
        read: Returns a segment by number.
    """
    names = set(leased.columns)
    late_names = {name for group in leased.groups for part in group.late for name in part[3]} & names
    parts = [group.parts for group in leased.groups]
    batch = _gather(parts, names - late_names, read, is_sorted=False)
    given: dict[str, Column] = {}
    for name in late_names:
        lasts = [[part[:3] for part in group.late if name in part[3]][-1:] or None for group in leased.groups]
        if all(lasts):
            given[name] = _gather([last for last in lasts if last], {name}, read, is_sorted=True)[name]
        else:  # some groups have it from the producer
            mixed = [(last or group.parts, last is None) for last, group in zip(lasts, leased.groups, strict=True)]
            pieces = [_gather([part], {name}, read, is_sorted=not is_put)[name] for part, is_put in mixed]
            given[name] = concat_columns(pieces)
    return batch.with_columns(given) if given else batch


def _gather(
    groups: Sequence[Sequence[tuple[int, int, int]]], names: set[str], read: Callable[[int], Batch], *, is_sorted: bool
) -> Batch:
    """Gather groups' rows from parts of segments; each group ordered by session and output."""
    parts = [(part, index) for index, group in enumerate(groups) for part in group]
    if len(parts) == 1 and parts[0][0][1] == 0:
        segment = read(parts[0][0][0])
        if len(segment) == parts[0][0][2]:
            return segment.only(names & segment.names)
    numbers = np.asarray([part[0] for part, _ in parts])
    places = np.repeat(np.arange(len(parts)), [part[2] for part, _ in parts])  # [rows], the part of each row
    pieces, positions = [], []
    for number in dict.fromkeys(numbers.tolist()):
        segment = read(number)
        own = np.flatnonzero(numbers == number)
        rows = np.concatenate([np.arange(first, first + n) for (_, first, n), _ in (parts[i] for i in own)])
        piece = segment.only(names & segment.names)
        is_whole = len(rows) == len(piece) and bool((rows == np.arange(len(rows))).all())
        pieces.append(piece if is_whole else piece.select(rows))
        positions.append(np.flatnonzero(numbers[places] == number))
    batch = Batch.concat(pieces)
    order = np.argsort(np.concatenate(positions))
    if not is_sorted and len(parts) > len(groups):
        group_of_row = np.asarray([index for _, index in parts])[places[np.concatenate(positions)]]
        order = batch.keys.in_order(group_of_row)
    return batch if bool((order[1:] > order[:-1]).all()) else batch.select(order)


def _lengths(batch: Batch) -> Array:
    ragged = next(
        (column for column in map(batch.__getitem__, sorted(batch.names)) if isinstance(column, Ragged)), None
    )
    return np.zeros(len(batch), dtype=np.int64) if ragged is None else ragged.lengths


def _widths(batch: Batch) -> tuple[int, int]:
    """Return bytes per token and per row over all columns."""
    token_bytes, row_bytes = 0, 8
    for name in batch.names:
        column = batch[name]
        if isinstance(column, Ragged):
            token_bytes += column.width
        else:
            row_bytes += column.nbytes // max(len(column), 1)
    return token_bytes, row_bytes


def _versions(batch: Batch, firsts: Array) -> list[tuple[int, int]]:
    """Return the oldest and newest policy version of each run of rows; -1 if no token has one."""
    if "policy_versions" not in batch:
        return [(-1, -1)] * len(firsts)
    versions = batch.ragged("policy_versions")
    values, offsets = versions.values, versions.offsets
    bounds = offsets[[*firsts.tolist(), len(batch)]]
    found = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        sampled = values[start:end][values[start:end] >= 0]
        found.append((int(sampled.min()), int(sampled.max())) if len(sampled) else (-1, -1))
    return found
