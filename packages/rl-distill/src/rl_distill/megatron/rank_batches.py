"""A micro-batch as one rank processes it: padded so that ranks can share its tokens, and cut to this rank's slice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from numpy.typing import NDArray
from torch import Tensor

from rl_core.data import Batch, offsets_of
from rl_distill.learner import MetricSums, metric_totals
from rl_distill.linear_map import sum_over_ranks
from rl_distill.megatron.any_model.images import PackImages
from rl_distill.megatron.attention.layout import PackedLayout, packed_layout
from rl_distill.objectives.micro_batches import needed_column
from rl_distill.objectives.teacher_tokens import TeacherTokens, teacher_tokens
from rl_distill.packing import Pack, pack_rows, unpack_trained
from rl_distill.prefixes import NUCLEUS, ROUTED_EXPERTS, PrefixForest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How ranks divide the tokens of a micro-batch.

    Attributes:
        context_group: Process group of the ranks that hold slices of the sequence; None if there is one slice.
        context_rank: Index of this rank's slice.
        context_size: Number of slices.
        sequence_size: Parts that sequence parallelism cuts each slice into, outside the matrix products.
        head_counts: Query and key heads for which this rank computes attention in buckets; None for flash attention.
        has_blocks: True to plan flash attention beside the buckets.
        frequencies: [rotated channels / 2] of the rotary embedding, in host memory.
    """

    context_group: Any
    context_rank: int
    context_size: int
    sequence_size: int
    head_counts: Sequence[int] | None
    frequencies: Tensor
    has_blocks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPack:
    """A pack and this rank's slice [start, stop) of its computed tokens, padded.

    Attributes:
        pack: The pack as the objective sees it: whole rows without padding.
        input_ids: [stop - start] int64.
        position_ids: [stop - start] int64.
        layout: Layout of all computed tokens, with the rotary tables and experts of the slice.
        kept: [K] int64 indices within the slice of hidden states that are scored.
        expand: [M] int64 index into `kept` of each token to score; None if M equals K.
        targets: [M] int64 ids of the tokens to score; [M] or [M, K] of the pack's `target_ids`; or [M, 1 + K] of the
            token and its `nucleus_ids`.
        scored: [N] int64 indices within the pack of the tokens that receive a score.
        given: [N] int64 index among the M scores of each receiving token; None if N equals M.
        sharing: How ranks divide the tokens.
        images: Images of the computed tokens; None if there are none.
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
    images: PackImages | None = None

    @property
    def teacher(self) -> TeacherTokens:
        """Teachers' results for the scored tokens.

        Raises:
            DataError: The batch lacks a teacher column.
        """
        return teacher_tokens(self.pack.micro_batch, self.scored)

    @property
    def loss_weights(self) -> Tensor:
        """[N] loss weights of the scored tokens.

        Raises:
            DataError: The batch has no loss_weights.
        """
        return needed_column(self.pack.micro_batch, "loss_weights", who="a comparison with teachers")[self.scored]

    @property
    def has_nucleus(self) -> bool:
        """Whether tokens are scored among the tokens of their nucleus."""
        return NUCLEUS in self.pack.micro_batch.columns

    def to_score(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [M, ...] of the tokens to score from the kept ones [K, ...]."""
        return hidden if self.expand is None else hidden.index_select(0, self.expand)

    def spread(self, values: Tensor) -> Tensor:
        """Return [T, ...] values of the whole pack, without padding, from this rank's [M, ...]; 0 if not scored."""
        shape = (len(self.pack.micro_batch.input_ids), *values.shape[1:])
        out = torch.zeros(shape, dtype=values.dtype, device=values.device)
        values = values if self.given is None else values.index_select(0, self.given)
        return sum_over_ranks(out.index_copy(0, self.scored, values), group=self.sharing.context_group)


def padded_length(pack: Pack, sharing: Sharing) -> int:
    """Return the number of computed tokens of a pack, padded so that ranks can divide them equally."""
    multiple = sharing.context_size * sharing.sequence_size
    return max(1, -(-pack.forest.num_computed // multiple)) * multiple


def place_pack(pack: Pack, scored: Tensor, sharing: Sharing, *, length: int, each_row: bool = False) -> PlacedPack:
    """Lay out a pack for this rank.

    Args:
        pack: Whole trajectories; may be empty.
        scored: [N] int64 indices of the tokens to score, none the first of its trajectory.
        sharing: How ranks divide the tokens.
        length: Number of tokens after padding: at least `padded_length`, and a multiple of the same number.
        each_row: Score a token that several rows share once per row, because teachers may score it differently in each.
            Tokens of a pack with `target_ids` or `nucleus_ids` are, too.
    """
    forest, micro_batch = pack.forest, pack.micro_batch
    num_padding = length - forest.num_computed
    places = torch.from_numpy(forest.places).to(scored.device)
    ids, positions = (_computed(x, places, forest) for x in (micro_batch.input_ids, micro_batch.position_ids))
    offsets = forest.offsets
    if num_padding:  # padding is a separate trajectory whose output is unused
        ids = torch.cat([ids, ids.new_zeros(num_padding)])
        positions = torch.cat([positions, torch.arange(num_padding, device=positions.device)])
        offsets = offsets_of([*np.diff(offsets), num_padding])
    layout = packed_layout(
        positions,
        offsets,
        frequencies=sharing.frequencies,
        head_counts=sharing.head_counts,
        spans=forest.spans,
        has_blocks=sharing.has_blocks,
    )
    length = len(ids) // sharing.context_size
    start = sharing.context_rank * length
    targets, before, given = places[scored], places[scored - 1], None
    target_ids, nucleus_ids = (micro_batch.columns.get(name) for name in ("target_ids", NUCLEUS))
    if forest.is_shared and not each_row and target_ids is None and nucleus_ids is None:
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
    wanted = ids.index_select(0, targets) if target_ids is None else target_ids[scored]
    return PlacedPack(
        pack=pack,
        input_ids=ids[start : start + length],
        position_ids=positions[start : start + length],
        layout=layout,
        kept=kept,
        expand=expand,
        targets=wanted if nucleus_ids is None else torch.cat([wanted.unsqueeze(-1), nucleus_ids[scored]], -1),
        scored=scored,
        given=given,
        sharing=sharing,
    )


def on_device(placed: PlacedPack, device: torch.device) -> PlacedPack:
    """Move a pack from host memory to the model's device without blocking the host."""
    if device.type == "cpu":
        return placed
    if "teacher_ids" in placed.pack.micro_batch.columns:
        _ = placed.teacher  # checks the values on the host, without synchronizing the GPU
    moved: PlacedPack = _moved(placed, device)
    return replace(moved, sharing=placed.sharing)


def _moved(value: Any, device: torch.device) -> Any:
    """Move a tensor, or each tensor in a record, mapping or tuple, to a device."""
    if torch.is_tensor(value):
        return value.pin_memory().to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _moved(one, device) for key, one in value.items()}
    if type(value) is tuple:
        return tuple(_moved(one, device) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def _computed(column: Tensor, places: Tensor, forest: PrefixForest) -> Tensor:
    """Return [C, ...] values of the computed tokens from the rows' [T, ...], which agree on shared tokens."""
    if not forest.is_shared:
        return column
    return column.new_empty((forest.num_computed, *column.shape[1:])).index_copy_(0, places, column)


def unknown_experts(packs: Sequence[Pack], layers: Sequence[int]) -> tuple[float, float]:
    """Return the number of tokens that lack an expert in one of these layers, and the number of tokens counted.

    A computed token counts if a trained token follows it in a row. The last token of a row never passed through the
    engine's model.
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
    """Return the [T of the slice, layers, top_k] experts that the engine chose; -1 in the padding."""
    experts = pack.micro_batch.columns.get(ROUTED_EXPERTS)
    if experts is None:
        return None
    length = num_tokens // sharing.context_size
    experts = _computed(experts, places, pack.forest)
    padded = F.pad(experts, (0, 0, 0, 0, 0, num_tokens - len(experts)), value=-1)
    return padded[sharing.context_rank * length : (sharing.context_rank + 1) * length]


_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """A data-parallel rank's share of a batch.

    Attributes:
        batch: The share's rows, in micro-batch order.
        sizes: Number of rows of each micro-batch.
        min_shared: Minimum length of a common prefix, in tokens, that rows of a prompt compute once; 0 disables
            sharing.
    """

    batch: Batch
    sizes: tuple[int, ...]
    min_shared: int = 0

    def packs(self) -> list[Pack]:
        """Return the micro-batches in host memory."""
        stops = np.cumsum(self.sizes, dtype=np.int64)
        rows = [np.arange(stop - size, stop) for stop, size in zip(stops, self.sizes, strict=True)]
        return [pack_rows(self.batch, of_pack, device=_HOST, min_shared=self.min_shared) for of_pack in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareResult:
    """Results of a forward and backward pass on one data-parallel rank.

    Attributes:
        loss: Loss of the global batch.
        metrics: (weighted sum, weight) of each metric over the share's rows.
        broken_rows: Rows of the share with a value that is not finite, if the loss or gradient norm is not.
        tokens: `ForwardBackwardResult.tokens` of the share's rows, in their order; empty unless requested.
        computed_tokens: Number of tokens computed for the share.
    """

    loss: float
    metrics: Mapping[str, tuple[float, float]]
    broken_rows: tuple[int, ...] = ()
    tokens: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    computed_tokens: int = 0


@dataclass(slots=True)
class Gathered:
    """Results of a step's micro-batches. Tensors stay on the device until the step ends."""

    losses: list[Tensor] = field(default_factory=list)
    metrics: list[MetricSums] = field(default_factory=list)
    values: list[tuple[Pack, Tensor]] = field(default_factory=list)
    scored: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, pack: Pack, values: Tensor, loss: Tensor, sums: MetricSums, *, scored: Mapping[str, Tensor]) -> None:
        """Add the results of one micro-batch.

        Args:
            pack: The micro-batch.
            values: [T, ...] values of its tokens; one that is not finite marks its row as broken.
            loss: Loss summed over the micro-batch.
            sums: Metric sums of the objective.
            scored: Requested [T, ...] values of its tokens by name.
        """
        self.losses.append(loss.detach())
        self.metrics.append(sums)
        self.values.append((pack, values.detach()))
        self.scored.append({name: of.detach() for name, of in scored.items()})

    def totals(self) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return the loss, and (weighted sum, weight) of each metric, with one GPU synchronization."""
        pairs = [pair for of_pack in self.metrics for pair in of_pack.values()]
        numbers = iter(_numbers([*self.losses, *(number for pair in pairs for number in pair)]))
        loss = sum(next(numbers) for _ in self.losses)
        totals = [{name: (next(numbers), next(numbers)) for name in of_pack} for of_pack in self.metrics]
        return loss, metric_totals(totals)

    def tokens(self, batch: Batch) -> dict[str, NDArray[np.float32]]:
        """Return the scored values by name, in the order of the share's rows."""
        found = unpack_trained([pack for pack, _ in self.values], self.scored, batch)
        return {name: of.values for name, of in found.items()}

    def broken_rows(self) -> tuple[int, ...]:
        """Return the rows with a value that is not finite."""
        return tuple(int(row) for pack, values in self.values for row in pack.rows[_broken(pack, values)])


@torch.no_grad()
def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Return scalar tensors, on the first one's device or elsewhere, as floats in a single transfer."""
    if not scalars:
        return []
    device = scalars[0].device
    together = torch.stack([torch.as_tensor(one, dtype=torch.float64, device=device) for one in scalars])
    return [float(number) for number in together.tolist()]


def _broken(pack: Pack, values: Tensor) -> NDArray[np.bool_]:
    """Return [S] bools, True for a trajectory with a value that is not finite."""
    micro_batch = pack.micro_batch
    is_broken = ~values.detach().isfinite().flatten(1).all(1) if values.ndim > 1 else ~values.detach().isfinite()
    for column in micro_batch.columns.values():
        if column.is_floating_point():
            is_broken |= ~column.isfinite().flatten(1).all(1) if column.ndim > 1 else ~column.isfinite()
    if "loss_mask" in micro_batch.columns and bool((is_broken & micro_batch.columns["loss_mask"]).any()):
        is_broken &= micro_batch.columns["loss_mask"]  # otherwise an untrained token caused it
    counts = np.add.reduceat(is_broken.cpu().numpy().astype(np.int64), pack.offsets[:-1])
    return np.asarray(counts > 0)
