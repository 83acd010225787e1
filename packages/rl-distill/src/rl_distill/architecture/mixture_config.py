"""Read the mixture-of-experts part of a config.json."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from rl_core.errors import DataError, SettingsError
from rl_core.files import preview
from rl_core.record_fields import settings_record

ExpertChoice = Literal["softmax", "sigmoid"]
"""How a router scores experts: softmax (Qwen3-MoE) or sigmoid (GLM)."""

MAX_COUNT = 1 << 26
MAX_COUNTS = {"num_hidden_layers": 4096, "n_layer": 4096, "max_position_embeddings": 1 << 40}
MAX_EXPERTS = 1 << 18
"""Maximum number of experts in all layers. Bounds the table of names, which is built before tensors are looked up."""

_AUXILIARY = ("aux_loss_alpha", "router_z_loss_coef", "moe_aux_loss_coeff", "moe_z_loss_coeff")
_BIAS_UPDATES = ("bias_update_speed", "router_bias_update_rate", "moe_router_bias_update_rate")
"""Fields of config files that request an auxiliary router loss, or updates of the router's bias."""


@settings_record
class SigmoidRouting:
    """A router that scores each expert from 0 to 1, then selects groups and experts by score plus bias.

    Attributes:
        num_groups: Number of expert groups of equal size.
        top_groups: Groups selected per token, by the sum of their two highest biased scores.
        scaling: Factor on the weights of a token's experts.
    """

    num_groups: int
    top_groups: int
    scaling: float


@settings_record
class MixtureConfig:
    """The mixture-of-experts layers of a policy.

    Attributes:
        num_experts: Routed experts per layer.
        top_k: Experts per token.
        norm_topk_prob: True if the probabilities of a token's experts are divided by their sum.
        ffn_hidden_size: Feed-forward width of an expert.
        layers: Indices of the mixture layers; the others have a dense feed-forward part.
        shared_ffn_hidden_size: Total feed-forward width of the shared experts, which process every token; 0 for none.
        sigmoid: Sigmoid routing; None for the top_k of a softmax.
    """

    num_experts: int
    top_k: int
    norm_topk_prob: bool
    ffn_hidden_size: int
    layers: tuple[int, ...]
    shared_ffn_hidden_size: int = 0
    sigmoid: SigmoidRouting | None = None


def read_mixture(config: Mapping[str, Any], choice: ExpertChoice) -> MixtureConfig | None:
    """Return the mixture configuration of a policy; None if it is dense.

    Args:
        config: The content of config.json.
        choice: How the policy's family scores experts.

    Raises:
        SettingsError: The file requests an auxiliary router loss, bias updates, or a router that could not learn.
        DataError: A number is out of range.
    """
    is_sigmoid = choice == "sigmoid"
    # The number is num_local_experts in transformers 5, num_experts in Qwen3's files, n_routed_experts in GLM's.
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    name = next((name for name in names if name in config), "n_routed_experts" if is_sigmoid else "num_experts")
    layers = _mixture_layers(config, is_sigmoid=is_sigmoid)
    if not layers or config[name] == 0:
        return None
    refuse_router_losses(config, default_coef=0.0 if is_sigmoid else 0.001)
    width = count(config, "moe_intermediate_size")
    mixture = MixtureConfig(
        num_experts=count(config, name),
        top_k=count(config, "num_experts_per_tok"),
        norm_topk_prob=bool(config.get("norm_topk_prob", is_sigmoid)),
        ffn_hidden_size=width,
        layers=layers,
        shared_ffn_hidden_size=width * count({"n_shared_experts": 1, **config}, "n_shared_experts") * is_sigmoid,
        sigmoid=_sigmoid_routing(config, config[name]) if is_sigmoid else None,
    )
    if len(layers) * mixture.num_experts > MAX_EXPERTS:
        raise DataError(f"config.json must have at most {MAX_EXPERTS} experts in all layers together.")
    possible = mixture.num_experts
    if (groups := mixture.sigmoid) is not None:
        possible = possible // groups.num_groups * groups.top_groups
    if mixture.top_k > possible:
        where = name if possible == mixture.num_experts else f"the experts of topk_group groups of {name}"
        raise DataError(f"num_experts_per_tok must be <= {where} = {possible}; found {mixture.top_k}.")
    if mixture.top_k == 1 and mixture.norm_topk_prob:
        raise SettingsError(
            "norm_topk_prob must be False when num_experts_per_tok is 1; found True. Each token's only expert would "
            "have weight 1, so the router would get no gradient."
        )
    return mixture


def _mixture_layers(config: Mapping[str, Any], *, is_sigmoid: bool) -> tuple[int, ...]:
    num_layers = count(config, "num_hidden_layers")
    if is_sigmoid:
        first = config.get("first_k_dense_replace", 1)
        if type(first) is not int or first < 0:
            raise DataError(f"config.json must have first_k_dense_replace >= 0; found {preview(first)}.")
        return tuple(range(first, num_layers))
    every = count(config, "decoder_sparse_step") if config.get("decoder_sparse_step") else 1
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(index for index in range(num_layers) if index not in dense and (index + 1) % every == 0)


def _sigmoid_routing(config: Mapping[str, Any], num_experts: int) -> SigmoidRouting:
    sizes = {"n_group": 1, "topk_group": 1, **config}
    routing = SigmoidRouting(
        num_groups=count(sizes, "n_group"),
        top_groups=count(sizes, "topk_group"),
        scaling=finite(config.get("routed_scaling_factor", 1.0)),
    )
    if num_experts % routing.num_groups or num_experts < 2 * routing.num_groups:
        raise DataError(
            f"n_group must divide n_routed_experts = {num_experts} into groups of at least 2; found "
            f"{routing.num_groups}."
        )
    if routing.top_groups > routing.num_groups:
        raise DataError(f"topk_group must be <= n_group = {routing.num_groups}; found {routing.top_groups}.")
    return routing


def count(config: Mapping[str, Any], name: str) -> int:
    """Return a field as an integer of at least 1.

    Raises:
        TypeError: The value is not an integer.
        DataError: The value is out of range.
    """
    value = config[name]
    most = MAX_COUNTS.get(name, MAX_COUNT)
    if type(value) is not int:
        raise TypeError(f"{name} must be a whole number; found {preview(value)}")
    if not 1 <= value <= most:
        bound = ">= 1" if value < 1 else f"<= {most}"
        raise DataError(f"config.json must have {name} {bound}; found {preview(value)}.")
    return value


def finite(value: Any) -> float:
    """Return a value as a finite float.

    Raises:
        ValueError: The value is not a finite number.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite; found {number}")
    return number


def refuse_router_losses(config: Mapping[str, Any], *, default_coef: float) -> None:
    """Refuse auxiliary losses, which would change the objective, and bias updates, which would break routing replay.

    Raises:
        SettingsError: The file requests one of them.
    """
    wanted = [name for name in _AUXILIARY if config.get(name)]
    # transformers adds the loss only if it outputs router logits; Qwen3's files set the coefficient without them.
    if config.get("output_router_logits") and config.get("router_aux_loss_coef", default_coef):
        wanted.append("router_aux_loss_coef with output_router_logits")
    if wanted:
        raise SettingsError(
            f"config.json requests an auxiliary router loss ({wanted[0]}), which the learners do not support because "
            "the objective would not include it. Set it to 0, or output_router_logits to false."
        )
    if updates := [name for name in _BIAS_UPDATES if config.get(name)]:
        raise SettingsError(
            f"config.json requests updates of the router's bias ({updates[0]}), which the learners do not support "
            "because engines choose experts with the loaded bias. Set it to 0."
        )
