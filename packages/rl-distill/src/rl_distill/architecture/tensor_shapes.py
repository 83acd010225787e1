"""List the tensors of a policy and count its parameters, from config.json alone; without torch."""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.transformers_model import (
    has_stateful_layers,
    head_name,
    model_shapes,
    untrained_names,
    vision_names,
)

Shape = tuple[int, ...]

ROUTED = ".mlp.experts."
"""Substring of the names of routed experts' tensors."""


class ParameterCounts(NamedTuple):
    """Parameter counts of a policy; a tied head counts once.

    Attributes:
        total: All parameters.
        active: Parameters that one token uses; of a mixture, only its top_k experts.
        multiplied: Active parameters of the matrices in the layers; every token is multiplied by them.
    """

    total: int
    active: int
    multiplied: int


@lru_cache(maxsize=8)
def count_parameters(config: PolicyConfig) -> ParameterCounts:
    """Return the parameter counts of a policy."""
    shapes, mixture = tensor_shapes(config), config.mixture
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ROUTED in name)
    idle = 0 if mixture is None else experts // mixture.num_experts * (mixture.num_experts - mixture.top_k)
    layers = (shape for name, shape in shapes.items() if name.startswith("model.layers.") and len(shape) > 1)
    total, matrices = sum(map(math.prod, shapes.values())), sum(map(math.prod, layers))
    return ParameterCounts(total, total - idle, matrices - idle)


def tensor_shapes(config: PolicyConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of a policy by Hugging Face name, without a tied head."""
    if config.model_json:
        return dict(model_shapes(config.model_json))
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = {**_attention_shapes(config), **_feed_forward_shapes(config, index)}
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _attention_shapes(config: PolicyConfig) -> dict[str, Shape]:
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_key_value_heads * head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"self_attn.{letter}_proj.weight"] = (rows, hidden)
        if config.has_qkv_bias:
            shapes[f"self_attn.{letter}_proj.bias"] = (rows,)
    if config.has_qk_norm:
        shapes.update({f"self_attn.{letter}_norm.weight": (head_dim,) for letter in "qk"})
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _feed_forward_shapes(config: PolicyConfig, layer: int) -> dict[str, Shape]:
    hidden = config.hidden_size

    def gated(prefix: str, ffn: int) -> dict[str, Shape]:
        rows = {f"{prefix}.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        return {**rows, f"{prefix}.down_proj.weight": (hidden, ffn)}

    mixture = config.mixture
    if mixture is None or not config.is_mixture(layer):
        return gated("mlp", config.ffn_hidden_size)
    shapes: dict[str, Shape] = {"mlp.gate.weight": (mixture.num_experts, hidden)}
    if mixture.sigmoid is not None:
        shapes["mlp.gate.e_score_correction_bias"] = (mixture.num_experts,)
    for expert in range(mixture.num_experts):
        shapes.update(gated(f"mlp.experts.{expert}", mixture.ffn_hidden_size))
    if mixture.shared_ffn_hidden_size:
        shapes.update(gated("mlp.shared_experts", mixture.shared_ffn_hidden_size))
    return shapes


def is_trained(name: str, config: PolicyConfig) -> bool:
    """Return whether a tensor is trained, without regard to an adapter."""
    return not keeps_float32(name, config) and not is_frozen(name, config)


def is_hidden_matrix(name: str, shape: Shape) -> bool:
    """Return whether Muon trains a tensor: the matrices of layers, except routers."""
    return len(shape) == 2 and name.startswith("model.layers.") and not name.endswith(".mlp.gate.weight")


def is_frozen(name: str, config: PolicyConfig) -> bool:
    """Return whether a tensor belongs to a vision tower that is not trained."""
    return bool(config.model_json) and not config.trains_vision and name in vision_names(config.model_json)


def keeps_float32(name: str, config: PolicyConfig) -> bool:
    """Return whether a tensor is not trained and is float32 in a policy of any dtype, such as a router's bias."""
    if config.model_json:
        return name in untrained_names(config.model_json)
    return name.endswith(".e_score_correction_bias")


def keeps_state(config: PolicyConfig) -> bool:
    """Return whether layers keep a state from token to token, so that rows are padded and share no prefixes."""
    return bool(config.model_json) and has_stateful_layers(config.model_json)


def output_name(config: PolicyConfig) -> str:
    """Return the name of the output matrix in a folder, which a critic does not have."""
    return head_name(config.model_json) if config.model_json else "lm_head.weight"


def forward_flops(config: PolicyConfig, lengths: Iterable[int], *, has_head: bool = True) -> float:
    """Return the floating-point operations of one forward pass; a backward pass needs about twice as many.

    Counts the matrix products that the model needs, with two operations per multiply-add: every weight matrix except
    the embedding once per token, and attention to the previous tokens. A mixture of experts counts only the experts to
    which a token is routed. Recomputation, padding and masked products do not count.

    Args:
        config: The policy's configuration.
        lengths: Length of each sequence in tokens.
        has_head: True if logits over the whole vocabulary are computed; False for a critic.
    """
    sizes = list(lengths)
    heads_width = config.num_heads * config.head_dim
    weights = count_parameters(config).multiplied
    if has_head:
        weights += config.vocab_size * config.hidden_size
    num_pairs = sum(size * (size + 1) / 2 for size in sizes)
    return 2.0 * weights * sum(sizes) + 4.0 * config.num_layers * heads_width * num_pairs
