"""Weights between Hugging Face names and megatron's, for any tensor- and pipeline-parallel slice.

megatron fuses what Hugging Face keeps apart: `linear_qkv` holds, group by group, the group's query heads, its
key and its value; `linear_fc1` of a rank holds its slice of the gate, then its slice of the up projection.
Nothing is computed, so that a round trip is exact to the bit; optimizer moments convert by the same rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.errors import ShapeError
from rl_distill.policy_config import PolicyConfig

State = Mapping[str, Tensor]

_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_LAYER_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
_LAYER_SPLIT_INPUT = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"
_FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a policy that one rank holds.

    Attributes:
        layers: Global indices of its decoder layers.
        has_embedding: True on the first pipeline stage.
        has_head: True on the last pipeline stage.
        tensor_rank: Which slice of each split tensor.
        tensor_size: Number of slices.
    """

    layers: range
    has_embedding: bool = True
    has_head: bool = True
    tensor_rank: int = 0
    tensor_size: int = 1


def whole_policy(config: PolicyConfig) -> Shard:
    """The shard of a single rank."""
    return Shard(layers=range(config.num_layers))


def to_megatron(tensors: State, config: PolicyConfig, shard: Shard) -> dict[str, Tensor]:
    """What a rank holds of a policy.

    Args:
        tensors: Whole tensors by Hugging Face name; those of the shard's layers are enough.
        config: The policy.
        shard: The rank's part.

    Returns:
        Tensors by megatron name; slices may be views.

    Raises:
        ShapeError: The heads cannot be split over the ranks.
    """
    _check_heads(config, shard)

    def slice_of(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(shard.tensor_size, dim)[shard.tensor_rank]

    state: dict[str, Tensor] = {}
    embedding = "model.embed_tokens.weight"
    if shard.has_embedding:
        state[_EMBEDDING] = slice_of(tensors[embedding], 0)
    if shard.has_head:
        state[_FINAL_NORM] = tensors["model.norm.weight"]
        if not (config.is_tied and shard.has_embedding):
            state[_HEAD] = slice_of(tensors[embedding if config.is_tied else "lm_head.weight"], 0)
    for local, index in enumerate(shard.layers):
        source, target = f"model.layers.{index}.", f"decoder.layers.{local}."
        for name, hf_name in _LAYER_WHOLE.items():
            state[target + name] = tensors[source + hf_name]
        for name, hf_name in _LAYER_SPLIT_INPUT.items():
            state[target + name] = slice_of(tensors[source + hf_name], 1)
        qkv = _fuse_qkv([tensors[source + name] for name in _QKV], config)
        state[target + "self_attention.linear_qkv.weight"] = slice_of(qkv, 0)
        gate_up = [slice_of(tensors[source + name], 0) for name in _GATE_UP]
        state[target + "mlp.linear_fc1.weight"] = torch.cat(gate_up)
    return state


def from_megatron(states: Sequence[State], config: PolicyConfig, shard: Shard) -> dict[str, Tensor]:
    """Whole tensors of one pipeline stage, by Hugging Face name.

    Args:
        states: megatron tensors of the stage's tensor-parallel ranks, in rank order.
        config: The policy.
        shard: The stage; its tensor rank and size do not matter.

    Returns:
        Tensors by Hugging Face name, views of the given ones where possible; a tied head is left out.
    """

    def join(name: str, dim: int) -> Tensor:
        return states[0][name] if len(states) == 1 else torch.cat([state[name] for state in states], dim)

    tensors: dict[str, Tensor] = {}
    if shard.has_embedding:
        tensors["model.embed_tokens.weight"] = join(_EMBEDDING, 0)
    for local, index in enumerate(shard.layers):
        source, target = f"decoder.layers.{local}.", f"model.layers.{index}."
        for name, hf_name in _LAYER_WHOLE.items():
            tensors[target + hf_name] = states[0][source + name]
        for name, hf_name in _LAYER_SPLIT_INPUT.items():
            tensors[target + hf_name] = join(source + name, 1)
        parts = _split_qkv(join(source + "self_attention.linear_qkv.weight", 0), config)
        tensors.update({target + name: part for name, part in zip(_QKV, parts, strict=True)})
        halves = [state[source + "mlp.linear_fc1.weight"].chunk(2) for state in states]
        for i, name in enumerate(_GATE_UP):
            tensors[target + name] = halves[0][i] if len(halves) == 1 else torch.cat([half[i] for half in halves])
    if shard.has_head:
        tensors["model.norm.weight"] = states[0][_FINAL_NORM]
        if not config.is_tied:
            tensors["lm_head.weight"] = join(_HEAD, 0)
    return tensors


def _check_heads(config: PolicyConfig, shard: Shard) -> None:
    if config.num_key_value_heads % shard.tensor_size:
        raise ShapeError(
            f"num_key_value_heads = {config.num_key_value_heads} must be divisible by the tensor-parallel size; "
            f"found {shard.tensor_size}."
        )


def _fuse_qkv(parts: Sequence[Tensor], config: PolicyConfig) -> Tensor:
    """[(heads + 2 * groups) * head_dim, hidden] of q, k and v, group by group."""
    groups, hidden = config.num_key_value_heads, parts[0].shape[1]
    return torch.cat([part.reshape(groups, -1, hidden) for part in parts], dim=1).reshape(-1, hidden)


def _split_qkv(qkv: Tensor, config: PolicyConfig) -> tuple[Tensor, ...]:
    groups, hidden = config.num_key_value_heads, qkv.shape[1]
    of_group = config.num_heads // groups * config.head_dim
    by_group = qkv.view(groups, -1, hidden)
    sizes = [of_group, config.head_dim, config.head_dim]
    return tuple(part.reshape(-1, hidden) for part in torch.split(by_group, sizes, dim=1))
