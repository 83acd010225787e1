"""A micro-batch as one rank sees it: padded for the ranks that share its tokens, and this rank's stretch of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from rl_core.data import offsets_of
from rl_distill.megatron.attention.buckets import PackedLayout, packed_layout
from rl_distill.objectives.micro_columns import needed_column
from rl_distill.objectives.teacher_tokens import TeacherTokens, teacher_tokens
from rl_distill.objectives.vocabulary_parts import sum_over_ranks
from rl_distill.packing import Pack
from rl_distill.prefixes import ROUTED_EXPERTS, PrefixForest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the ranks share the tokens of a micro-batch.

    Attributes:
        context_group: Ranks that each hold a stretch; None where there is one.
        context_rank: Which stretch.
        context_size: Number of stretches.
        sequence_size: Parts that each stretch is cut into between the matrices.
        head_counts: Heads of queries and of keys for which this rank attends by buckets; None for flash attention.
        frequencies: [rotated channels / 2] of the rotary embedding, in the host's memory.
    """

    context_group: Any
    context_rank: int
    context_size: int
    sequence_size: int
    head_counts: Sequence[int] | None
    frequencies: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPack:
    """A pack and this rank's stretch [start, stop) of the tokens that are computed for it, padded.

    Attributes:
        pack: The pack as the objective sees it: whole rows without padding.
        input_ids: [stop - start] int64.
        position_ids: [stop - start] int64.
        layout: Of all tokens that are computed, with tables and experts of the stretch.
        kept: [K] int64 indices within the stretch whose hidden states are scored.
        expand: [M] int64 of those, the hidden state of each token to score; None where they are as many.
        targets: [M] int64 ids of the tokens to score.
        scored: [N] int64 indices within the pack of the tokens that get a score.
        given: [N] int64 which of the M scores each one gets; None where they are as many.
        sharing: How tokens are shared.
    """

    pack: Pack
    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    kept: Tensor
    expand: Tensor | None
    targets: Tensor
    scored: Tensor
    given: Tensor | None
    sharing: Sharing

    @property
    def teacher(self) -> TeacherTokens:
        """What teachers said of the scored tokens.

        Raises:
            DataError: The batch lacks a column of theirs.
        """
        return teacher_tokens(self.pack.micro_batch, self.scored)

    @property
    def loss_weights(self) -> Tensor:
        """[M] of the scored tokens.

        Raises:
            DataError: The batch has none.
        """
        return needed_column(self.pack.micro_batch, "loss_weights", who="a comparison with teachers")[self.scored]

    def to_score(self, hidden: Tensor) -> Tensor:
        """[M, ...] hidden states of the tokens to score, from the kept ones [K, ...]."""
        return hidden if self.expand is None else hidden.index_select(0, self.expand)

    def spread(self, values: Tensor) -> Tensor:
        """[T, ...] of the whole pack, without padding, from this rank's [M, ...]; 0 where nothing was scored."""
        shape = (len(self.pack.micro_batch.input_ids), *values.shape[1:])
        out = torch.zeros(shape, dtype=values.dtype, device=values.device)
        values = values if self.given is None else values.index_select(0, self.given)
        return sum_over_ranks(out.index_copy(0, self.scored, values), group=self.sharing.context_group)


def padded_length(pack: Pack, sharing: Sharing) -> int:
    """Tokens that are computed for a pack, with padding that lets ranks share them equally."""
    multiple = sharing.context_size * sharing.sequence_size
    return max(1, -(-pack.forest.num_computed // multiple)) * multiple


def place_pack(pack: Pack, scored: Tensor, sharing: Sharing, *, length: int, each_row: bool = False) -> PlacedPack:
    """See a pack as this rank does.

    Args:
        pack: Whole trajectories; may be empty.
        scored: [N] int64 tokens of the pack to score, none the first of its trajectory.
        sharing: How tokens are shared.
        length: Tokens to pad to; at least `padded_length`, and a multiple of what it is one of.
        each_row: Score a token of several rows for each of them, as where teachers may say different things of it.
    """
    forest, micro_batch = pack.forest, pack.micro_batch
    num_padding = length - forest.num_computed
    places = torch.from_numpy(forest.places).to(scored.device)
    ids, positions = (_computed(x, places, forest) for x in (micro_batch.input_ids, micro_batch.position_ids))
    offsets = forest.offsets
    if num_padding:  # a trajectory of its own, which nobody reads
        ids = torch.cat([ids, ids.new_zeros(num_padding)])
        positions = torch.cat([positions, torch.arange(num_padding, device=positions.device)])
        offsets = offsets_of([*np.diff(offsets), num_padding])
    layout = packed_layout(
        positions, offsets, frequencies=sharing.frequencies, head_counts=sharing.head_counts, spans=forest.spans
    )
    length = len(ids) // sharing.context_size
    start = sharing.context_rank * length
    targets, before, given = places[scored], places[scored - 1], None
    if forest.is_shared and not each_row:
        targets, given = torch.unique(targets, return_inverse=True)
        before = torch.empty_like(targets).index_copy_(0, given, before)
    is_own = (before >= start) & (before < start + length)
    if sharing.context_size > 1:
        number = torch.cumsum(is_own, 0) - 1
        is_given = is_own if given is None else is_own[given]
        scored, given = scored[is_given], None if given is None else number[given[is_given]]
        targets, before = targets[is_own], before[is_own]
    kept, expand = before - start, None
    if forest.is_shared:
        kept, expand = torch.unique(kept, return_inverse=True)
    tables = {name: getattr(layout, name)[start : start + length] for name in ("cos", "sin")}
    experts = _own_experts(pack, places, len(ids), sharing)
    routed = None if experts is None else experts.new_zeros(experts.shape[1], 2)
    layout = replace(layout, kept=kept, experts=experts, routed=routed, **tables)
    return PlacedPack(
        pack=pack,
        input_ids=ids[start : start + length],
        position_ids=positions[start : start + length],
        layout=layout,
        kept=kept,
        expand=expand,
        targets=ids.index_select(0, targets),
        scored=scored,
        given=given,
        sharing=sharing,
    )


def on_device(placed: PlacedPack, device: torch.device) -> PlacedPack:
    """A pack that was placed in the host's memory, where the model is; the host does not wait for a GPU."""
    if device.type == "cpu":
        return placed
    if "teacher_ids" in placed.pack.micro_batch.columns:
        _ = placed.teacher  # checks its values, which no GPU is stopped for
    moved: PlacedPack = _moved(placed, device)
    return replace(moved, sharing=placed.sharing)


def _moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a record, mapping or tuple of such, on a device."""
    if torch.is_tensor(value):
        value = value.pin_memory() if device.type == "cuda" else value
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _moved(one, device) for key, one in value.items()}
    if type(value) is tuple:
        return tuple(_moved(one, device) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def _computed(column: Tensor, places: Tensor, forest: PrefixForest) -> Tensor:
    """[C, ...] of the tokens that are computed, from the rows' [T, ...], which agree where they share a token."""
    if not forest.is_shared:
        return column
    return column.new_empty((forest.num_computed, *column.shape[1:])).index_copy_(0, places, column)


def unknown_experts(packs: Sequence[Pack], layers: Sequence[int]) -> tuple[float, float]:
    """Computed tokens that lack an expert in one of these layers, and how many there are.

    They count where a trained token follows in their row: the last one never ran through the engine's model.
    """
    num_unknown = num_tokens = 0
    for pack in packs:
        columns, places = pack.micro_batch.columns, pack.forest.places
        is_known = (columns[ROUTED_EXPERTS][:, list(layers)] >= 0).flatten(1).all(1).cpu().numpy()
        num_trained = (
            np.cumsum(columns["loss_mask"].cpu().numpy()) if "loss_mask" in columns else np.arange(len(places))
        )
        counts = num_trained < np.repeat(num_trained[pack.offsets[1:] - 1], np.diff(pack.offsets))
        num_tokens += len(np.unique(places[counts]))
        num_unknown += len(np.unique(places[counts & ~is_known]))
    return float(num_unknown), float(num_tokens)


def _own_experts(pack: Pack, places: Tensor, num_tokens: int, sharing: Sharing) -> Tensor | None:
    """[T of the stretch, layers, top_k] experts that the engine chose; -1 in the padding."""
    experts = pack.micro_batch.columns.get(ROUTED_EXPERTS)
    if experts is None:
        return None
    length = num_tokens // sharing.context_size
    experts = _computed(experts, places, pack.forest)
    padded = F.pad(experts, (0, 0, 0, 0, 0, num_tokens - len(experts)), value=-1)
    return padded[sharing.context_rank * length : (sharing.context_rank + 1) * length]
