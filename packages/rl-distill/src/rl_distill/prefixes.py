"""Forests of the prefixes that rows share, so that each shared segment is computed once.

Sources: AReaL's tree attention and Megatron-LM #7387 also share prefixes in training. Here, segments are in depth-first
order: all continuations of a segment are contiguous, and attention needs no mask.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Batch, Ragged, offsets_of, token_positions
from rl_distill.row_images import image_numbers

Int64s = NDArray[np.int64]

ROUTED_EXPERTS = "routed_experts"
NUCLEUS = "nucleus_ids"


@dataclass(frozen=True, slots=True)
class PrefixForest:
    """Segments of the C computed tokens of T row tokens, in depth-first order.

    Segments s + 1 to stop[s] - 1 continue segment s, so their tokens are contiguous.

    Attributes:
        parent: [S] int64 parent segment of each segment; -1 at the start of a row.
        stop: [S] int64 index of the first later segment that does not continue the segment.
        offsets: [S + 1] int64 offsets of the segments in the computed tokens; every segment has at least one token.
        places: [T] int64 index of the computed token of each row token.
    """

    parent: Int64s
    stop: Int64s
    offsets: Int64s
    places: Int64s

    @property
    def num_computed(self) -> int:
        """Number of computed tokens."""
        return int(self.offsets[-1])

    @property
    def is_shared(self) -> bool:
        """Whether rows share computed tokens; if not, each row is computed on its own, in order."""
        return self.num_computed < len(self.places)

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """For each segment with continuations: its first token, the first token of its continuations, and their end."""
        inner = np.flatnonzero(self.stop > np.arange(len(self.stop)) + 1)
        columns = (self.offsets[inner], self.offsets[inner + 1], self.offsets[self.stop[inner]])
        return tuple(zip(*(column.tolist() for column in columns), strict=True))


def separate_rows(lengths: Int64s) -> PrefixForest:
    """Return a forest without sharing: each row is one segment."""
    offsets = offsets_of(lengths)
    count = np.arange(len(lengths), dtype=np.int64)
    return PrefixForest(np.full(len(lengths), -1), count + 1, offsets, np.arange(int(offsets[-1]), dtype=np.int64))


def prefix_forest(rows: Sequence[Int64s], *, min_shared: int) -> PrefixForest:
    """Find the prefixes that rows share.

    Args:
        rows: Tokens of each row; equal numbers are equal tokens.
        min_shared: Minimum tokens of a shared segment, at least 1.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">i8").tobytes())
    shared = [_num_common(rows[a], rows[b]) for a, b in itertools.pairwise(order)]
    parent: list[int] = []
    lengths: list[int] = []
    paths: list[list[int]] = [[] for _ in rows]
    # order[low:high] agree up to depth; `above` is the segment before.
    pending = [(0, len(rows), 0, -1)] if rows else []
    while pending:
        low, high, depth, above = pending.pop()
        common = min(shared[low : high - 1], default=len(rows[order[low]]))
        if common > depth and (high - low == 1 or common - depth >= min_shared):
            parent.append(above)
            lengths.append(common - depth)
            depth, above = common, len(parent) - 1
            for row in order[low:high]:
                paths[row].append(above)
        if high - low > 1:
            cuts = [i + 1 for i in range(low, high - 1) if shared[i] - depth < min_shared]
            parts = zip([low, *cuts], [*cuts, high], strict=True)
            pending += [(start, stop, depth, above) for start, stop in parts][::-1]
    offsets = offsets_of(lengths)
    path = np.array([segment for of_row in paths for segment in of_row], dtype=np.int64)
    places = token_positions(offsets[path], np.diff(offsets)[path])
    return PrefixForest(np.array(parent, dtype=np.int64), _stops(parent), offsets, places)


def _num_common(one: Int64s, other: Int64s) -> int:
    """Length of the common prefix."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def _stops(parent: Sequence[int]) -> Int64s:
    stop = np.arange(1, len(parent) + 1)
    for segment in range(len(parent) - 1, -1, -1):
        if parent[segment] >= 0:
            stop[parent[segment]] = max(stop[parent[segment]], stop[segment])
    return stop


def batch_forest(batch: Batch, *, min_shared: int) -> PrefixForest:
    """Build the forest of a batch; rows of different prompts share nothing.

    Rows share a token only if it belongs to the same image, and the engine chose the same experts for it.

    Args:
        batch: Needs `input_ids`; rows of a prompt need not be adjacent.
        min_shared: Minimum tokens of a shared segment; 0 disables sharing.
    """
    lengths = batch.ragged("input_ids").lengths
    prompts = batch.keys.prompts
    if min_shared == 0 or len(np.unique(prompts)) == len(prompts):
        return separate_rows(lengths)
    tokens, starts = _told_apart(batch), offsets_of(lengths)
    places = np.empty(int(starts[-1]), dtype=np.int64)
    parents, stops, sizes = [], [], []
    num_segments = num_computed = 0
    for prompt in dict.fromkeys(prompts.tolist()):
        rows = np.flatnonzero(prompts == prompt)
        part = prefix_forest([tokens[row] for row in rows], min_shared=min_shared)
        places[token_positions(starts[rows], lengths[rows])] = part.places + num_computed
        parents.append(np.where(part.parent < 0, -1, part.parent + num_segments))
        stops.append(part.stop + num_segments)
        sizes.append(np.diff(part.offsets))
        num_segments += len(part.parent)
        num_computed += part.num_computed
    if num_computed == len(places):
        return separate_rows(lengths)
    return PrefixForest(np.concatenate(parents), np.concatenate(stops), offsets_of(np.concatenate(sizes)), places)


def _told_apart(batch: Batch) -> Ragged:
    """Return numbers that are equal if and only if the token, its image and its chosen experts are equal."""
    ids, images = batch.ragged("input_ids"), image_numbers(batch)
    columns = [] if images is None else [images[:, None]]
    if ROUTED_EXPERTS in batch:
        columns.append(batch.ragged(ROUTED_EXPERTS).values.reshape(len(ids.values), -1))
    if not columns:
        return ids
    rows = np.concatenate([ids.values[:, None], *columns], axis=1)
    return Ragged(np.unique(rows, axis=0, return_inverse=True)[1].ravel(), ids.offsets)


def computed_units(
    batch: Batch, *, min_shared: int, max_tokens: int, num_ranks: int = 1
) -> tuple[list[Int64s], Int64s]:
    """Group rows that are best computed together, with the number of their computed tokens.

    Args:
        batch: Needs `input_ids`; no row is empty.
        min_shared: Minimum tokens of a shared segment; 0 disables sharing.
        max_tokens: Maximum computed tokens of a unit; a larger unit is halved as long as it has several rows.
        num_ranks: Number of ranks; a unit larger than one rank's share of the work is halved too.

    Returns:
        Row indices of each unit, with each row in one unit; and [units] int64 computed tokens. A row that shares
        nothing is its own unit.
    """
    lengths = batch.ragged("input_ids").lengths
    alone: list[Int64s] = list(np.arange(len(lengths), dtype=np.int64)[:, None])
    if min_shared == 0 or len(np.unique(batch.keys.prompts)) == len(lengths):
        return alone, lengths
    tokens = _told_apart(batch)
    order = np.argsort(batch.keys.prompts, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(batch.keys.prompts[order])) + 1)

    def parts_of(units: Sequence[Int64s], limit: int) -> list[tuple[Int64s, int]]:
        pending, found = list(units), []
        while pending:
            rows = pending.pop()
            size = prefix_forest([tokens[row] for row in rows], min_shared=min_shared).num_computed
            if size == lengths[rows].sum():
                found += [(alone[row], int(lengths[row])) for row in rows]
            elif size > limit:  # several rows: one shares nothing
                pending += np.array_split(rows, 2)
            else:
                found.append((rows, size))
        return found

    found = parts_of(groups, max_tokens)
    if num_ranks > 1:
        limit = -(-sum(size for _, size in found) // num_ranks)
        found = parts_of([rows for rows, _ in found], min(limit, max_tokens))
    found.sort(key=lambda unit: int(unit[0][0]))
    return [rows for rows, _ in found], np.array([size for _, size in found], dtype=np.int64)
