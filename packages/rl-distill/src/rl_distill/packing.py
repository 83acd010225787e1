"""Packs rows into micro-batches under a token budget, end to end and without padding."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.data import Batch, ImageSpan, Ragged, column_spec, offsets_of, token_positions
from rl_core.errors import ShapeError
from rl_distill.learner import MicroBatch
from rl_distill.prefixes import NUCLEUS, ROUTED_EXPERTS, PrefixForest, batch_forest, computed_units

Rows = NDArray[np.int64]

INDICES = frozenset({ROUTED_EXPERTS, NUCLEUS, "target_ids", "teacher_ids", "teacher_index"})
"""Token columns that hold indices (int64); all others hold floats or booleans."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A micro-batch and the rows it contains.

    Attributes:
        micro_batch: The packed tensors, on the learner's device.
        rows: [S] int64 row indices in the batch, in packing order.
        offsets: [S + 1] int64, the micro-batch's offsets on the CPU.
        forest: Prefixes that the rows share.
        images: Images among each row's tokens.
    """

    micro_batch: MicroBatch
    rows: Rows
    offsets: NDArray[np.int64]
    forest: PrefixForest
    images: tuple[tuple[ImageSpan, ...], ...] = ()


def plan_micro_batches(lengths: NDArray[np.int64], *, max_tokens: int) -> list[Rows]:
    """Split rows, sorted by length, into as few and as even micro-batches as the budget allows.

    Rows of similar length then share attention calls. The plan depends only on the lengths.

    Args:
        lengths: [N] tokens of each row.
        max_tokens: Maximum tokens of a micro-batch; a longer row gets its own.

    Returns:
        Row indices of each micro-batch; each row is in exactly one.

    Raises:
        ShapeError: max_tokens is below 1, or a row is empty.
    """
    lengths = _checked(lengths, max_tokens)
    if len(lengths) == 0:
        return []
    order = np.argsort(lengths, kind="stable")
    return _evened(order, lengths[order], num_cuts=len(_cuts(lengths[order], max_tokens)), max_tokens=max_tokens)


def plan_ranks(
    lengths: NDArray[np.int64], *, max_tokens: int, num_ranks: int, multiple_of: int = 1
) -> list[list[Rows]]:
    """Balance rows over data-parallel ranks by tokens, and split each rank's rows into equally many micro-batches.

    Args:
        lengths: [N] tokens of each row.
        max_tokens: Maximum tokens of a micro-batch; a longer row gets its own.
        num_ranks: Data-parallel ranks.
        multiple_of: The number of micro-batches per rank is a multiple of this.

    Returns:
        For each rank, the row indices of each of its micro-batches. With few rows, the last micro-batches are empty.

    Raises:
        ShapeError: max_tokens is below 1, or a row is empty.
    """
    lengths = _checked(lengths, max_tokens)
    shares = _balanced(lengths, num_ranks)
    fewest = max((len(plan_micro_batches(lengths[share], max_tokens=max_tokens)) for share in shares), default=0)
    num_micro_batches = -(-max(fewest, 1) // multiple_of) * multiple_of
    plans = []
    for share in shares:
        order = share[np.argsort(lengths[share], kind="stable")]
        plan = _evened(order, lengths[order], num_cuts=num_micro_batches, max_tokens=max_tokens)
        plans.append(plan + [np.zeros(0, dtype=np.int64)] * (num_micro_batches - len(plan)))
    return plans


def plan_batch(
    batch: Batch, *, max_tokens: int, num_ranks: int, multiple_of: int = 1, min_shared: int = 0
) -> list[list[Rows]]:
    """Assign a batch's rows to ranks and micro-batches by the tokens computed for them; see `plan_ranks`.

    Args:
        batch: Needs the column `input_ids`.
        max_tokens: Maximum computed tokens of a micro-batch; a longer row gets its own.
        num_ranks: Data-parallel ranks.
        multiple_of: The number of micro-batches per rank is a multiple of this.
        min_shared: Minimum length in tokens of a prefix that is computed once for the rows of a prompt; 0 disables
            sharing.

    Raises:
        ShapeError: max_tokens is below 1, or a row is empty.
    """
    _checked(batch.ragged("input_ids").lengths, max_tokens)
    units, sizes = computed_units(batch, min_shared=min_shared, max_tokens=max_tokens, num_ranks=num_ranks)
    plans = plan_ranks(sizes, max_tokens=max_tokens, num_ranks=num_ranks, multiple_of=multiple_of)
    empty = np.zeros(0, dtype=np.int64)
    return [[np.concatenate([empty, *(units[unit] for unit in part)]) for part in plan] for plan in plans]


def _checked(lengths: NDArray[np.int64], max_tokens: int) -> NDArray[np.int64]:
    if max_tokens < 1:
        raise ShapeError(f"micro_batch_tokens must be at least 1; found {max_tokens}.")
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and int(lengths.min()) < 1:
        raise ShapeError(f"row {int(lengths.argmin())} has no tokens; every row needs at least one.")
    return lengths


def _balanced(lengths: NDArray[np.int64], num_ranks: int) -> list[Rows]:
    """Assign rows to ranks greedily: longest first, each to the rank with the fewest tokens so far."""
    loads = [(0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in np.argsort(-lengths, kind="stable"):
        load, rank = heapq.heappop(loads)
        shares[rank].append(int(row))
        heapq.heappush(loads, (load + int(lengths[row]), rank))
    return [np.array(share, dtype=np.int64) for share in shares]


def _evened(order: Rows, ordered: NDArray[np.int64], *, num_cuts: int, max_tokens: int) -> list[Rows]:
    """Split sorted rows under the smallest budget that needs at most num_cuts parts, then halve the largest parts.

    Args:
        order: [N] row indices, sorted by length.
        ordered: [N] lengths of these rows.
        num_cuts: Number of parts; fewer only if there are fewer rows.
        max_tokens: A budget that is known to need at most num_cuts parts.
    """
    if len(order) == 0:
        return []
    low, high = min(max_tokens, -(-int(ordered.sum()) // num_cuts)), max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(ordered, middle)) <= num_cuts:
            high = middle
        else:
            low = middle + 1
    starts = _cuts(ordered, high)
    while len(starts) < min(num_cuts, len(order)):
        sizes = np.diff([*starts, len(order)])
        largest = int(sizes.argmax())
        starts.insert(largest + 1, starts[largest] + int(sizes[largest]) // 2)
    return [order[start:stop] for start, stop in zip(starts, [*starts[1:], len(order)], strict=True)]


def _cuts(ordered: NDArray[np.int64], max_tokens: int) -> list[int]:
    """Return the start of each micro-batch when each is filled until the next row does not fit."""
    ends = np.cumsum(ordered)
    starts = [0]
    while True:
        start = starts[-1]
        used = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, used + max_tokens, side="right")))
        if stop >= len(ordered):
            return starts
        starts.append(stop)


def pack_rows(batch: Batch, rows: Rows, *, device: torch.device, min_shared: int = 0) -> Pack:
    """Pack rows into a micro-batch with every token column of the batch.

    Args:
        batch: Needs the column `input_ids`.
        rows: [S] row indices, in packing order.
        device: Device of the tensors.
        min_shared: Minimum length in tokens of a prefix that is computed once for the rows of a prompt; 0 disables
            sharing.
    """
    ids = batch.ragged("input_ids")
    lengths = ids.lengths[rows]
    offsets = offsets_of(lengths)
    places = token_positions(ids.offsets[rows], lengths)
    positions = np.arange(int(offsets[-1]), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
    columns = {}
    for name in sorted(batch.names - {"input_ids"}):
        column = batch[name]
        if isinstance(column, Ragged):
            columns[name] = _tensor(column.values[places].astype(_dtype(name), copy=False), device)
    micro_batch = MicroBatch(
        input_ids=_tensor(ids.values[places].astype(np.int64), device),
        position_ids=_tensor(positions, device),
        offsets=_tensor(offsets, device),
        columns=columns,
    )
    needed = batch.only({"input_ids"} | ({ROUTED_EXPERTS} & batch.names)).select(rows)
    return Pack(micro_batch, rows, offsets, batch_forest(needed, min_shared=min_shared), needed.images)


def _dtype(column: str) -> type[np.generic]:
    if column in INDICES:
        return np.int64
    return np.bool_ if column_spec(column).dtype == "bool" else np.float32


def _tensor(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def pack_batch(batch: Batch, *, max_tokens: int, device: torch.device) -> list[Pack]:
    """Pack all rows of a batch into micro-batches.

    Raises:
        ShapeError: max_tokens is below 1, or a row is empty.
    """
    plan = plan_micro_batches(batch.ragged("input_ids").lengths, max_tokens=max_tokens)
    return [pack_rows(batch, rows, device=device) for rows in plan]


def scored_tokens(pack: Pack, *, mask: str | None) -> torch.Tensor:
    """Return [M] int64 indices of the tokens that need a logprob; never the first of a trajectory.

    Args:
        pack: The micro-batch.
        mask: Bool column that selects tokens; None selects all.
    """
    micro_batch = pack.micro_batch
    is_scored = micro_batch.position_ids > 0
    if mask is not None:
        is_scored &= micro_batch.columns[mask]
    return is_scored.nonzero().squeeze(1)


def unpack_values(packs: Sequence[Pack], values: Sequence[torch.Tensor], batch: Batch) -> Ragged:
    """Combine the token values of packs into a column in the batch's row order.

    Args:
        packs: Packs that together contain every row of the batch.
        values: [T, ...] values of each pack.
        batch: Batch of the packs.

    Returns:
        float32, aligned with input_ids.
    """
    ids = batch.ragged("input_ids")
    element = values[0].shape[1:] if values else ()
    out = np.zeros((len(ids.values), *element), dtype=np.float32)
    for pack, tokens in zip(packs, values, strict=True):
        places = token_positions(ids.offsets[pack.rows], np.diff(pack.offsets))
        out[places] = tokens.detach().float().cpu().numpy()
    return Ragged(out, ids.offsets)


def unpack_trained(
    packs: Sequence[Pack], scored: Sequence[Mapping[str, torch.Tensor]], batch: Batch
) -> dict[str, Ragged]:
    """Combine the values of trained tokens into columns in the batch's row order; 0 at untrained tokens.

    Args:
        packs: Packs of rows of the batch.
        scored: [T, ...] values by name for each pack; all packs have the same names.
        batch: Batch of the packs.

    Returns:
        float32, aligned with input_ids; {} without packs.
    """
    masks = [pack.micro_batch.columns.get("loss_mask") for pack in packs]
    trained = [
        {
            name: values if mask is None else values * mask.view(-1, *[1] * (values.ndim - 1))
            for name, values in named.items()
        }
        for named, mask in zip(scored, masks, strict=True)
    ]
    names = trained[0] if trained else ()
    return {name: unpack_values(packs, [named[name] for named in trained], batch) for name in names}
