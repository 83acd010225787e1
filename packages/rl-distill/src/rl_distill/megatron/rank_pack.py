"""A micro-batch as one rank sees it: padded for the ranks that share its tokens, and this rank's stretch of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from rl_core.data import offsets_of
from rl_distill.megatron.attention_buckets import PackedLayout, packed_layout
from rl_distill.objectives.logit_divergence import TeacherTokens, teacher_tokens
from rl_distill.objectives.micro_columns import needed_column
from rl_distill.objectives.vocabulary_parts import sum_over_ranks
from rl_distill.packing import ROUTED_EXPERTS, Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the ranks share the tokens of a micro-batch.

    Attributes:
        context_group: Ranks that each hold a stretch; None where there is one.
        context_rank: Which stretch.
        context_size: Number of stretches.
        sequence_size: Parts that each stretch is cut into between the matrices.
        head_counts: Heads of queries and of keys for which this rank attends.
        frequencies: [head_dim / 2] of the rotary embedding, on the rank's device.
    """

    context_group: Any
    context_rank: int
    context_size: int
    sequence_size: int
    head_counts: Sequence[int]
    frequencies: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPack:
    """A pack and this rank's stretch [start, stop) of its T padded tokens.

    Attributes:
        pack: The pack as the objective sees it, whole and without padding.
        input_ids: [stop - start] int64.
        position_ids: [stop - start] int64.
        layout: Of the whole pack, with tables and experts of the stretch.
        kept: [M] int64 indices within the stretch whose hidden states are scored.
        targets: [M] int64 ids of the tokens that these are scored for.
        scored: [M] int64 indices within the pack of those tokens.
        sharing: How tokens are shared.
    """

    pack: Pack
    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    kept: Tensor
    targets: Tensor
    scored: Tensor
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

    def spread(self, values: Tensor) -> Tensor:
        """[T, ...] of the whole pack, without padding, from this rank's [M, ...]; 0 where nothing was scored."""
        shape = (len(self.pack.micro_batch.input_ids), *values.shape[1:])
        out = torch.zeros(shape, dtype=values.dtype, device=values.device)
        return sum_over_ranks(out.index_copy(0, self.scored, values), group=self.sharing.context_group)


def padded_length(pack: Pack, sharing: Sharing) -> int:
    """Tokens of a pack with padding that lets ranks share it equally."""
    multiple = sharing.context_size * sharing.sequence_size
    return max(1, -(-int(pack.offsets[-1]) // multiple)) * multiple


def place_pack(pack: Pack, scored: Tensor, sharing: Sharing, *, length: int) -> PlacedPack:
    """See a pack as this rank does.

    Args:
        pack: Whole trajectories; may be empty.
        scored: [M] int64 tokens of the pack to score, none the first of its trajectory.
        sharing: How tokens are shared.
        length: Tokens to pad to; at least `padded_length`, and a multiple of what it is one of.
    """
    micro_batch = pack.micro_batch
    num_padding = length - int(pack.offsets[-1])
    ids, positions, offsets = micro_batch.input_ids, micro_batch.position_ids, pack.offsets
    if num_padding:  # a trajectory of its own, which nobody reads
        ids = torch.cat([ids, ids.new_zeros(num_padding)])
        positions = torch.cat([positions, torch.arange(num_padding, device=positions.device)])
        offsets = offsets_of([*np.diff(offsets), num_padding])
    layout = packed_layout(positions, offsets, frequencies=sharing.frequencies, head_counts=sharing.head_counts)
    length = len(ids) // sharing.context_size
    start = sharing.context_rank * length
    before = scored - 1
    own = scored[(before >= start) & (before < start + length)] if sharing.context_size > 1 else scored
    kept = own - 1 - start
    tables = {name: getattr(layout, name)[start : start + length] for name in ("cos", "sin")}
    layout = replace(layout, kept=kept, experts=_own_experts(pack, len(ids), sharing), **tables)
    return PlacedPack(
        pack=pack,
        input_ids=ids[start : start + length],
        position_ids=positions[start : start + length],
        layout=layout,
        kept=kept,
        targets=ids.index_select(0, own),
        scored=own,
        sharing=sharing,
    )


def _own_experts(pack: Pack, num_tokens: int, sharing: Sharing) -> Tensor | None:
    """[T of the stretch, layers, top_k] experts that the engine chose; -1 in the padding."""
    experts = pack.micro_batch.columns.get(ROUTED_EXPERTS)
    if experts is None:
        return None
    length = num_tokens // sharing.context_size
    padded = F.pad(experts, (0, 0, 0, 0, 0, num_tokens - len(experts)), value=-1)
    return padded[sharing.context_rank * length : (sharing.context_rank + 1) * length]
