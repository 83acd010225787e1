"""What config.json says about mixtures of experts."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from rl_core.errors import DataError, SettingsError
from rl_core.files import shown
from rl_core.record_fields import settings_record

ExpertChoice = Literal["softmax", "sigmoid"]
"""How a router scores its experts: Qwen3-MoE's, or GLM's."""

MAX_COUNT = 1 << 26
MAX_COUNTS = {"num_hidden_layers": 4096, "max_position_embeddings": 1 << 40}
MAX_EXPERTS = 1 << 18
"""Of all layers: each has three tensors, whose names are made before any is looked for."""

_AUXILIARY = ("aux_loss_alpha", "router_z_loss_coef", "moe_aux_loss_coeff", "moe_z_loss_coeff")
_BIAS_UPDATES = ("bias_update_speed", "router_bias_update_rate", "moe_router_bias_update_rate")
"""What config files that ask for a loss of the router, or for updates of its bias, call it."""


@settings_record
class SigmoidRouting:
    """A router whose experts have a score each, from 0 to 1, and are chosen by it and a bias, group by group.

    Attributes:
        num_groups: Groups of experts, of equal size.
        top_groups: Groups of a token: those with the largest sums of their two largest scores.
        scaling: Multiplies the weights of a token's experts.
    """

    num_groups: int
    top_groups: int
    scaling: float


@settings_record
class MixtureConfig:
    """The mixtures of experts of a policy.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        norm_topk_prob: True when the probabilities of a token's experts are divided by their sum.
        ffn_hidden_size: Width of an expert.
        layers: Which layers are mixtures; the others have one feed-forward layer.
        shared_ffn_hidden_size: Width of the experts that every token goes through, together; 0 for none.
        sigmoid: How experts are chosen; None for the largest of a softmax.
    """

    num_experts: int
    top_k: int
    norm_topk_prob: bool
    ffn_hidden_size: int
    layers: tuple[int, ...]
    shared_ffn_hidden_size: int = 0
    sigmoid: SigmoidRouting | None = None


def read_mixture(config: Mapping[str, Any], choice: ExpertChoice) -> MixtureConfig | None:
    """The mixtures of a policy; None where it is dense.

    Args:
        config: The content of config.json.
        choice: How its family chooses experts.

    Raises:
        SettingsError: A loss of the router, or what would never train, is asked for.
        DataError: A number is impossible.
    """
    is_sigmoid = choice == "sigmoid"
    # transformers 5 calls num_local_experts what Qwen3's own files call num_experts, and GLM's n_routed_experts.
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    name = next((name for name in names if name in config), "n_routed_experts" if is_sigmoid else "num_experts")
    layers = _mixture_layers(config, is_sigmoid=is_sigmoid)
    if not layers or config[name] == 0:
        return None
    _refuse_router_losses(config, default_coef=0.0 if is_sigmoid else 0.001)
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
            "norm_topk_prob must be False where num_experts_per_tok is 1: an expert's share would be 1 whatever the "
            "router says, and the router would never learn."
        )
    return mixture


def _mixture_layers(config: Mapping[str, Any], *, is_sigmoid: bool) -> tuple[int, ...]:
    num_layers = count(config, "num_hidden_layers")
    if is_sigmoid:
        first = config.get("first_k_dense_replace", 1)
        if type(first) is not int or first < 0:
            raise DataError(f"config.json must have first_k_dense_replace >= 0; found {shown(first)}.")
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
    """A whole number of at least 1.

    Raises:
        TypeError: It is something else.
        DataError: It is out of range.
    """
    value = config[name]
    most = MAX_COUNTS.get(name, MAX_COUNT)
    if type(value) is not int:
        raise TypeError(f"{name} must be a whole number; found {shown(value)}")
    if not 1 <= value <= most:
        bound = ">= 1" if value < 1 else f"<= {most}"
        raise DataError(f"config.json must have {name} {bound}; found {shown(value)}.")
    return value


def finite(value: Any) -> float:
    """A finite number.

    Raises:
        ValueError: It is something else.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite; found {number}")
    return number


def _refuse_router_losses(config: Mapping[str, Any], *, default_coef: float) -> None:
    """Auxiliary losses would change what the objective means, bias updates which experts a replay gives."""
    wanted = [name for name in _AUXILIARY if config.get(name)]
    # transformers adds the loss where it gives the router's logits; Qwen3's files have the coefficient without.
    if config.get("output_router_logits") and config.get("router_aux_loss_coef", default_coef):
        wanted.append("router_aux_loss_coef with output_router_logits")
    if wanted:
        raise SettingsError(
            f"config.json asks for an auxiliary loss of the router ({wanted[0]}), and the learners add none: it would "
            "be no part of the objective. Set it to 0, or output_router_logits to false."
        )
    if updates := [name for name in _BIAS_UPDATES if config.get(name)]:
        raise SettingsError(
            f"config.json asks for updates of the router's bias ({updates[0]}), and the learners keep it as it was "
            "loaded: engines choose experts with it. Set it to 0."
        )
