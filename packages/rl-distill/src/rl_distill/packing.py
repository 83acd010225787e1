"""Rows into micro-batches by a budget of tokens: packed end to end, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.batch import Batch
from rl_core.columns import column_spec
from rl_core.errors import ShapeError
from rl_core.ragged import Ragged, offsets_of, token_positions
from rl_distill.learner import MicroBatch

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pack:
    """A micro-batch and where it came from.

    Attributes:
        micro_batch: On the learner's device.
        rows: [S] int64 rows of the batch, in the order of the pack.
        offsets: [S + 1] int64, the micro-batch's offsets on the CPU.
    """

    micro_batch: MicroBatch
    rows: Rows
    offsets: NDArray[np.int64]


def plan_micro_batches(lengths: NDArray[np.int64], *, max_tokens: int) -> list[Rows]:
    """Cut rows, sorted by length, into as few micro-batches as the budget allows, as even as they can be.

    Neighbours of nearly equal length share attention calls. The plan depends on the lengths alone.

    Args:
        lengths: [N] tokens of each row.
        max_tokens: Most tokens of a micro-batch; a longer row gets its own.

    Returns:
        Rows of each micro-batch; each row is in exactly one.

    Raises:
        ShapeError: max_tokens is below 1, or a row is empty.
    """
    if max_tokens < 1:
        raise ShapeError(f"micro_batch_tokens must be at least 1; found {max_tokens}.")
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) == 0:
        return []
    if int(lengths.min()) < 1:
        raise ShapeError(f"row {int(lengths.argmin())} has no tokens; every row needs at least one.")
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    fewest = len(_cuts(ordered, max_tokens))
    low, high = min(max_tokens, -(-int(ordered.sum()) // fewest)), max_tokens
    while low < high:  # the smallest budget that needs no more micro-batches
        middle = (low + high) // 2
        if len(_cuts(ordered, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    cuts = _cuts(ordered, high)
    return [order[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(order)], strict=True)]


def _cuts(ordered: NDArray[np.int64], max_tokens: int) -> list[int]:
    """Starts of the micro-batches when each takes rows while they fit."""
    ends = np.cumsum(ordered)
    starts = [0]
    while True:
        start = starts[-1]
        used = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, used + max_tokens, side="right")))
        if stop >= len(ordered):
            return starts
        starts.append(stop)


def pack_rows(batch: Batch, rows: Rows, *, device: torch.device) -> Pack:
    """Make a micro-batch of some rows, with every token column of the batch.

    Args:
        batch: Has `input_ids`.
        rows: [S] rows to take, in this order.
        device: Where the tensors go.
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
            dtype = np.bool_ if column_spec(name).dtype == "bool" else np.float32
            columns[name] = _tensor(column.values[places].astype(dtype, copy=False), device)
    micro_batch = MicroBatch(
        input_ids=_tensor(ids.values[places].astype(np.int64), device),
        position_ids=_tensor(positions, device),
        offsets=_tensor(offsets, device),
        columns=columns,
    )
    return Pack(micro_batch, rows, offsets)


def _tensor(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def pack_batch(batch: Batch, *, max_tokens: int, device: torch.device) -> list[Pack]:
    """All rows of a batch in micro-batches.

    Raises:
        ShapeError: As `plan_micro_batches`.
    """
    plan = plan_micro_batches(batch.ragged("input_ids").lengths, max_tokens=max_tokens)
    return [pack_rows(batch, rows, device=device) for rows in plan]


def scored_tokens(pack: Pack, *, mask: str | None) -> torch.Tensor:
    """[M] int64 indices of the tokens that need a logprob: never the first of a trajectory.

    Args:
        pack: The micro-batch.
        mask: A bool column to keep to, or None for all tokens.
    """
    micro_batch = pack.micro_batch
    is_scored = micro_batch.position_ids > 0
    if mask is not None:
        is_scored &= micro_batch.columns[mask]
    return is_scored.nonzero().squeeze(1)


def unpack_values(packs: Sequence[Pack], values: Sequence[torch.Tensor], batch: Batch) -> Ragged:
    """Token values of packs as a column in the batch's row order.

    Args:
        packs: Of every row of the batch.
        values: [T] of each pack.
        batch: Where they came from.

    Returns:
        float32, aligned with input_ids.
    """
    ids = batch.ragged("input_ids")
    out = np.zeros(len(ids.values), dtype=np.float32)
    for pack, tokens in zip(packs, values, strict=True):
        places = token_positions(ids.offsets[pack.rows], np.diff(pack.offsets))
        out[places] = tokens.detach().float().cpu().numpy()
    return Ragged(out, ids.offsets)
