"""Map parts of a rank's tensors to rectangles of Hugging Face tensors.

Megatron fuses tensors that Hugging Face stores separately. `linear_qkv` holds the query heads, key and value of each
group in turn. `linear_fc1` of a rank holds its slice of the gate, then its slice of the up projection. For experts, one
tensor holds these matrices of all experts of the rank. A `TensorBlock` names one rectangle and a view of the rank's
tensor with the same elements in the same order. Nothing is computed, so reading, writing and changing the layout are
bit-exact. Optimizer moments use the same blocks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.errors import ShapeError
from rl_core.weights import folder_views
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import Shape
from rl_distill.architecture.transformers_model import meta_model

State = Mapping[str, Tensor]

_LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts."
_SHARED = "mlp.shared_experts."
_EMBEDDING = "model.embed_tokens.weight"
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
_QKV = {"self_attention.linear_qkv.weight": "weight", "self_attention.linear_qkv.bias": "bias"}
_ADAPTER = ".lora_"
_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a policy that one chunk of a rank's model holds.

    Attributes:
        layers: Global indices of its decoder layers.
        has_embedding: True on the first pipeline stage.
        has_head: True on the last pipeline stage.
        tensor_rank: Index of the slice of each tensor-parallel tensor.
        tensor_size: Number of slices.
        expert_rank: Index of the consecutive range of each layer's experts.
        expert_size: Number of ranges.
        expert_tensor_rank: Index of the slice of each expert's tensors.
        expert_tensor_size: Number of slices.
    """

    layers: range
    has_embedding: bool = True
    has_head: bool = True
    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBlock:
    """A rectangle of a Hugging Face tensor and the rank's elements of it.

    Attributes:
        name: Hugging Face name of the tensor.
        shape: Shape of the whole tensor.
        offsets: Start of the rectangle along each axis.
        sizes: Size of the rectangle along each axis; 0 rows if the rank holds only padding.
        view: The rank's elements in the rectangle's order; may have more axes than the tensor.
        is_primary: False if another tensor-parallel rank or pipeline stage holds the same elements and this copy need
            not be saved: replicated tensors such as norms and routers on tensor ranks above 0, and a tied head on a
            separate stage. Copies on data-parallel ranks are not considered.
        is_expert: True for an expert's tensors, which are replicated over expert-data-parallel ranks. Others are
            replicated over data- and context-parallel ranks.
        padding: Rows of the rank's tensor beyond the vocabulary; None for none.
        is_divided: True if FSDP divides the tensor over the data-parallel ranks, so that no other has these elements.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    view: Tensor
    is_primary: bool = True
    is_expert: bool = False
    padding: Tensor | None = None
    is_divided: bool = False

    def read(self) -> Tensor:
        """Return the rectangle as a contiguous tensor; a view of the rank's tensor if its layout allows."""
        return self.view.detach().reshape(self.sizes).contiguous()

    def write(self, value: Tensor) -> None:
        """Fill the rank's elements; padding becomes 0.

        Args:
            value: Tensor of shape `sizes`, of any dtype and device.

        Raises:
            ShapeError: The value has another shape.
        """
        if tuple(value.shape) != self.sizes:
            raise ShapeError(
                f"{self.name}: the rectangle at {list(self.offsets)} must have shape {list(self.sizes)}; "
                f"found {list(value.shape)}."
            )
        with torch.no_grad():
            self.view.copy_(value.reshape(self.view.shape))
            if self.padding is not None:
                self.padding.zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """How one tensor is split over ranks.

    Attributes:
        rank: Index of this rank's slice.
        size: Number of slices.
        is_expert: True for an expert's tensors.
    """

    rank: int
    size: int
    is_expert: bool = False

    def rows(self, name: str, view: Tensor) -> TensorBlock:
        """Return the block of a matrix split along its first axis; `view` may have several axes for it."""
        return self._cut(name, view, (view.numel() // view.shape[-1], view.shape[-1]), axis=0)

    def vector(self, name: str, view: Tensor) -> TensorBlock:
        """Return the block of a split vector; `view` may have several axes."""
        return self._cut(name, view, (view.numel(),), axis=0)

    def columns(self, name: str, view: Tensor) -> TensorBlock:
        """Return the block of a matrix split along its second axis."""
        return self._cut(name, view, tuple(view.shape), axis=1)

    def whole(self, name: str, view: Tensor) -> TensorBlock:
        """Return the block of a replicated tensor."""
        return whole_block(name, view, is_primary=self.rank == 0)

    def _cut(self, name: str, view: Tensor, sizes: tuple[int, ...], *, axis: int) -> TensorBlock:
        shape = tuple(size * self.size if i == axis else size for i, size in enumerate(sizes))
        offsets = tuple(size * self.rank if i == axis else 0 for i, size in enumerate(sizes))
        return TensorBlock(name=name, shape=shape, offsets=offsets, sizes=sizes, view=view, is_expert=self.is_expert)


def whole_block(name: str, tensor: Tensor, *, is_primary: bool) -> TensorBlock:
    """Return the block of a replicated tensor; one rank's copy is primary."""
    shape, offsets = tuple(tensor.shape), (0,) * tensor.ndim
    return TensorBlock(name=name, shape=shape, offsets=offsets, sizes=shape, view=tensor, is_primary=is_primary)


def held_blocks(name: str, tensor: Tensor, view: Tensor | None = None, *, is_primary: bool = True) -> list[TensorBlock]:
    """Return the blocks of what a rank holds of a tensor: all of it, or rows if FSDP divides it.

    Args:
        name: Name of the tensor in a folder.
        tensor: The rank's tensor.
        view: The folder's tensor as a view of it, without memory if it is divided; None if both are equal.
        is_primary: See `TensorBlock`.
    """
    view = _whole(tensor) if view is None else view
    if not isinstance(tensor, DTensor):
        return [whole_block(name, view, is_primary=is_primary)]
    rows, per_row = held_rows(tensor), math.prod(tensor.shape[1:])
    flat = rows.flatten()
    (mesh,) = tensor.device_mesh.shape
    start = per_row * min(tensor.device_mesh.get_local_rank() * -(-tensor.shape[0] // mesh), tensor.shape[0])
    blocks = []
    for offsets, sizes in rectangles(view, start, start + flat.numel()):
        first = view.storage_offset() + sum(o * stride for o, stride in zip(offsets, view.stride(), strict=True))
        own = flat.as_strided(sizes, view.stride(), flat.storage_offset() + first - start)
        shape = tuple(view.shape)
        blocks.append(TensorBlock(name=name, shape=shape, offsets=offsets, sizes=sizes, view=own, is_divided=True))
    return blocks


def held_rows(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, which FSDP may divide by rows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rectangles(view: Tensor, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield offsets and sizes of the rectangles of a view that lie in a range of its storage.

    Each index of the axis with the longest stride is inside, outside, or cut by an end of the range, and then divided
    along its other axes.

    Args:
        view: View of a contiguous tensor.
        start: First element of the range.
        stop: End of the range.
    """
    first = int(view.storage_offset())
    yield from _rectangles(view, (0,) * view.ndim, start - first, stop - first)


def _rectangles(part: Tensor, offsets: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the rectangles of a part of a view at these offsets; the range counts from the part's first element."""
    if not part.numel():
        return
    size = 1 + sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True))
    if start >= size or stop <= 0:
        return
    if start <= 0 and size <= stop:
        yield offsets, tuple(part.shape)
        return
    axis = max((axis for axis in range(part.ndim) if part.shape[axis] > 1), key=part.stride)
    count, stride = part.shape[axis], part.stride(axis)
    width = size - (count - 1) * stride
    low, high = max(0, -(-start // stride)), min(count, (stop - width) // stride + 1)
    touched = range(max(0, (start - width) // stride + 1), min(count, -(-stop // stride)))
    pieces = [(index, 1) for index in touched if not low <= index < high]
    for index, number in [*([(low, high - low)] if low < high else []), *pieces]:
        at = tuple(o + index if i == axis else o for i, o in enumerate(offsets))
        yield from _rectangles(part.narrow(axis, index, number), at, start - index * stride, stop - index * stride)


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor, or one of its whole shape without memory if FSDP divides it."""
    return torch.empty(tensor.shape, device="meta") if isinstance(tensor, DTensor) else tensor


def padded_vocab_size(config: PolicyConfig, tensor_size: int) -> int:
    """Return the number of rows of the embedding, padded to split evenly over the tensor-parallel ranks."""
    return -(-config.vocab_size // tensor_size) * tensor_size


def blocks_of(state: State, config: PolicyConfig, shard: Shard) -> list[TensorBlock]:
    """Return the blocks that map a rank's tensors to a policy's Hugging Face tensors.

    The primary blocks of all ranks of a model cover every Hugging Face tensor exactly once. A tied head is not a
    separate tensor.

    Args:
        state: Tensors of one model chunk by Megatron's name: its parameters, or others of the same shapes.
        config: The policy's configuration.
        shard: The chunk's part of the policy, of a layout that `check_layout` accepts.

    Raises:
        ShapeError: A name is unknown.
    """
    if config.model_json:
        tensors = {name.removeprefix("inner."): tensor for name, tensor in state.items()}
        adapter = {f"{name}.weight": tensor for name, tensor in tensors.items() if _ADAPTER in name}
        owners = {name: tensor for name, tensor in tensors.items() if _ADAPTER not in name}
        wholes = {name: _whole(tensor) for name, tensor in owners.items()}
        owner = {wholes[name].untyped_storage()._cdata: tensor for name, tensor in owners.items()}
        views = folder_views(meta_model(config.model_json), wholes)
        return [
            block
            for name, view in (views | adapter).items()
            for block in held_blocks(name, owner.get(view.untyped_storage()._cdata, view), view)
        ]
    return [block for name, tensor in state.items() for block in _blocks(name, tensor, config, shard)]


def _blocks(name: str, tensor: Tensor, config: PolicyConfig, shard: Shard) -> list[TensorBlock]:
    split = _Split(rank=shard.tensor_rank, size=shard.tensor_size)
    if name.startswith(_LAYERS):
        local, _, part = name.removeprefix(_LAYERS).partition(".")
        prefix = f"model.layers.{shard.layers[int(local)]}."
        if part.startswith(_EXPERTS):
            return _expert_blocks(part.removeprefix(_EXPERTS), prefix, tensor, config, shard)
        return _layer_blocks(part, prefix, tensor, config, split)
    if name == "decoder.final_layernorm.weight":
        return [split.whole("model.norm.weight", tensor)]
    if name == "embedding.word_embeddings.weight":
        return [_vocabulary_block(_EMBEDDING, tensor, config, split, is_copy=False)]
    if name == "output_layer.weight":
        hf_name = _EMBEDDING if config.is_tied else "lm_head.weight"
        return [_vocabulary_block(hf_name, tensor, config, split, is_copy=config.is_tied)]
    raise _unknown(name)


def _layer_blocks(part: str, prefix: str, tensor: Tensor, config: PolicyConfig, split: _Split) -> list[TensorBlock]:
    if _ADAPTER in part:
        return [_adapter_block(part, prefix, tensor, split)]
    if part in _WHOLE:
        return [split.whole(prefix + _WHOLE[part], tensor)]
    if part in _QKV:
        return _qkv_blocks(prefix, tensor, config, split, kind=_QKV[part])
    if part.startswith(_SHARED):
        blocks = _feed_forward_blocks(part.replace(_SHARED, "mlp.", 1), prefix, tensor, split)
        return [replace(block, name=block.name.replace(".mlp.", f".{_SHARED}", 1)) for block in blocks]
    return _feed_forward_blocks(part, prefix, tensor, split)


def _adapter_block(part: str, prefix: str, tensor: Tensor, split: _Split) -> TensorBlock:
    """Return the block of an A [rank, in] or B [out, rank], such as "self_attention.linear_qkv.lora_A.q_proj"."""
    layer, kind, matrix = part.rsplit(".", 2)
    parent = "self_attn" if layer.startswith("self_attention.") else "mlp"
    name = f"{prefix}{parent}.{matrix}.{kind}.weight"
    is_cut_by_columns = matrix in ("o_proj", "down_proj")
    if is_cut_by_columns == (kind == "lora_B"):
        return split.whole(name, tensor)
    return split.columns(name, tensor) if is_cut_by_columns else split.rows(name, tensor)


def _qkv_blocks(prefix: str, tensor: Tensor, config: PolicyConfig, split: _Split, *, kind: str) -> list[TensorBlock]:
    """Return the blocks of a weight [(heads + 2 * groups) * head_dim, hidden], or of a bias without the last axis."""
    groups, queries = config.num_key_value_heads // split.size, config.num_heads // config.num_key_value_heads
    by_group = tensor.view(groups, queries + 2, config.head_dim, *tensor.shape[1:])
    parts = {"q": by_group[:, :queries], "k": by_group[:, queries : queries + 1], "v": by_group[:, queries + 1 :]}
    cut = split.rows if kind == "weight" else split.vector
    return [cut(f"{prefix}self_attn.{letter}_proj.{kind}", view) for letter, view in parts.items()]


def _feed_forward_blocks(part: str, prefix: str, tensor: Tensor, split: _Split) -> list[TensorBlock]:
    if part in _COLUMNS:
        return [split.columns(prefix + _COLUMNS[part], tensor)]
    if part != "mlp.linear_fc1.weight":
        raise _unknown(part)
    gate, up = tensor.chunk(2)
    return [split.rows(f"{prefix}mlp.gate_proj.weight", gate), split.rows(f"{prefix}mlp.up_proj.weight", up)]


def _expert_blocks(part: str, prefix: str, tensor: Tensor, config: PolicyConfig, shard: Shard) -> list[TensorBlock]:
    """Return the blocks of a matrix stacked over all experts of the rank, [experts, rows, columns]."""
    first = shard.expert_rank * (config.num_experts // shard.expert_size)
    split = _Split(rank=shard.expert_tensor_rank, size=shard.expert_tensor_size, is_expert=True)
    return [
        replace(block, name=block.name.replace(".mlp.", f".mlp.experts.{expert}.", 1))
        for expert, matrix in enumerate(tensor, start=first)
        for block in _feed_forward_blocks(f"mlp.{part}.weight", prefix, matrix, split)
    ]


def _vocabulary_block(name: str, tensor: Tensor, config: PolicyConfig, split: _Split, *, is_copy: bool) -> TensorBlock:
    """Return the block of [padded vocabulary / ranks, hidden]; the last ranks may have padding rows."""
    rows, hidden = tensor.shape
    start = min(split.rank * rows, config.vocab_size)
    real = min(rows, config.vocab_size - start)
    return TensorBlock(
        name=name,
        shape=(config.vocab_size, hidden),
        offsets=(start, 0),
        sizes=(real, hidden),
        view=tensor[:real],
        is_primary=real > 0 and not is_copy,
        padding=tensor[real:] if real < rows else None,
    )


def _unknown(name: str) -> ShapeError:
    return ShapeError(
        f"{name!r} must be Megatron's name of a policy tensor; no tensor of a Hugging Face folder corresponds to it."
    )
