"""What a Hugging Face config.json says about a policy, checked for what the learners support."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, RLError, SettingsError
from rl_core.files import read_json_object, shown
from rl_core.record_fields import converts_arguments, settings_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What models of one architecture have in common.

    Attributes:
        has_qkv_bias: True when queries, keys and values have a bias.
        has_qk_norm: True when queries and keys are normalised, head by head.
        has_experts: True when layers can be mixtures of experts.
        default_head_dim: Size of a head where config.json has none; None for hidden_size / num_attention_heads.
    """

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_experts: bool = False
    default_head_dim: int | None = None


FAMILIES = {
    "Qwen3ForCausalLM": Family(has_qk_norm=True, default_head_dim=128),
    "Qwen3MoeForCausalLM": Family(has_qk_norm=True, has_experts=True),
    "Qwen2ForCausalLM": Family(has_qkv_bias=True),
    "LlamaForCausalLM": Family(),
}
"""Families by the architecture that config.json names; Qwen2ForCausalLM is also Qwen2.5's."""

MAX_COUNT = 1 << 26
MAX_COUNTS = {"num_hidden_layers": 4096, "max_position_embeddings": 1 << 40}
MAX_EXPERTS = 1 << 18
"""Of all layers: each has three tensors, whose names are made before any is looked for."""

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
"""Architectures that the learners train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Positions divided by a factor.

    Attributes:
        factor: Divides every position.
    """

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3's scaling of long waves.

    Attributes:
        factor: Divides the frequencies of long waves.
        low_freq_factor: Waves longer than the original length by this are long.
        high_freq_factor: Waves shorter than the original length by this stay.
        original_max_position_embeddings: The original length, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@settings_record
class MixtureConfig:
    """The mixtures of experts of a policy.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        norm_topk_prob: True when the probabilities of a token's experts are divided by their sum.
        ffn_hidden_size: Width of an expert.
        layers: Which layers are mixtures; the others have one feed-forward layer.
    """

    num_experts: int
    top_k: int
    norm_topk_prob: bool
    ffn_hidden_size: int
    layers: tuple[int, ...]


@settings_record
class PolicyConfig:
    """Shape of a decoder.

    Attributes:
        architecture: One of SUPPORTED_ARCHITECTURES.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the gated feed-forward layer, where a layer is no mixture of experts.
        num_heads: Query heads.
        num_key_value_heads: Key and value heads.
        head_dim: Size of a head.
        vocab_size: Rows of the embedding.
        max_position_embeddings: Longest sequence that the model was made for.
        norm_eps: Of the RMS norms.
        rope_base: Base of the rotary embedding.
        rope_scaling: Of its positions; None for none.
        is_tied: True when the head is the embedding.
        initializer_range: Standard deviation of random weights.
        mixture: The mixtures of experts; None for a dense policy.
    """

    architecture: str = "Qwen3ForCausalLM"
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope_base: float
    rope_scaling: LinearRopeScaling | Llama3RopeScaling | None = None
    is_tied: bool
    initializer_range: float
    mixture: MixtureConfig | None = None

    @property
    def family(self) -> Family:
        """What the architecture implies."""
        return FAMILIES[self.architecture]

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 for a dense policy."""
        return 0 if self.mixture is None else self.mixture.num_experts

    def is_mixture(self, layer: int) -> bool:
        """Whether the layer with this index is a mixture of experts."""
        return self.mixture is not None and layer in self.mixture.layers

    @property
    def digest(self) -> str:
        """Fingerprint of everything that weights must agree with."""
        fields = {name: value for name, value in asdict(self).items() if name != "initializer_range"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tied(self) -> dict[str, str]:
        """Names served from another tensor."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.is_tied else {}


@converts_arguments
def read_policy_config(policy_dir: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises:
        DataError: The file is missing or no JSON object.
    """
    path = policy_dir / "config.json"
    if not os.path.lexists(path):
        raise DataError(f"{path} does not exist; give a Hugging Face model folder.")
    return read_json_object(path)


def parse_policy_config(config: Mapping[str, Any]) -> PolicyConfig:
    """Understand a config.json.

    Raises:
        SettingsError: The architecture, or something in it, is not supported.
        DataError: A field is missing, or impossible.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named or "(none)"
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        is_name = isinstance(architecture, str) and architecture.isprintable() and len(architecture) <= 80
        found = architecture if is_name else shown(architecture)
        raise SettingsError(f"architecture {found} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}.")
    try:
        _refuse_unsupported(config)
        return _policy_config(config, architecture)
    except RLError:
        raise
    except KeyError as error:
        raise DataError(f"config.json has no field {error}; a {architecture} needs it.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise DataError(f"config.json has a field of the wrong kind: {error}.") from error


def _policy_config(config: Mapping[str, Any], architecture: str) -> PolicyConfig:
    family = FAMILIES[architecture]
    num_heads, hidden_size = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    groups = _count(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else num_heads
    if num_heads % groups:
        raise DataError(
            f"num_attention_heads must be divisible by num_key_value_heads; found {num_heads} and {groups}."
        )
    head_dim = family.default_head_dim or hidden_size // num_heads
    if config.get("head_dim"):
        head_dim = _count(config, "head_dim")
    rope = _rope(config)
    return PolicyConfig(
        architecture=architecture,
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=_count(config, "intermediate_size"),
        num_heads=num_heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=_count(config, "vocab_size"),
        max_position_embeddings=_count(config, "max_position_embeddings"),
        norm_eps=_finite(config["rms_norm_eps"]),
        rope_base=_finite(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        initializer_range=_finite(config.get("initializer_range", 0.02)),
        mixture=_mixture(config) if family.has_experts else None,
    )


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    most = MAX_COUNTS.get(name, MAX_COUNT)
    if type(value) is not int:
        raise TypeError(f"{name} must be a whole number; found {shown(value)}")
    if not 1 <= value <= most:
        bound = ">= 1" if value < 1 else f"<= {most}"
        raise DataError(f"config.json must have {name} {bound}; found {shown(value)}.")
    return value


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite; found {number}")
    return number


def _mixture(config: Mapping[str, Any]) -> MixtureConfig | None:
    # transformers 5 calls num_local_experts what Qwen3's own files call num_experts.
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    every = _count(config, "decoder_sparse_step") if config.get("decoder_sparse_step") else 1
    dense = set(config.get("mlp_only_layers") or ())
    num_layers = _count(config, "num_hidden_layers")
    layers = tuple(index for index in range(num_layers) if index not in dense and (index + 1) % every == 0)
    if not layers or config[name] == 0:
        return None
    mixture = MixtureConfig(
        num_experts=_count(config, name),
        top_k=_count(config, "num_experts_per_tok"),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        ffn_hidden_size=_count(config, "moe_intermediate_size"),
        layers=layers,
    )
    if len(layers) * mixture.num_experts > MAX_EXPERTS:
        raise DataError(f"config.json must have at most {MAX_EXPERTS} experts in all layers together.")
    if mixture.top_k > mixture.num_experts:
        raise DataError(f"num_experts_per_tok must be <= {name} = {mixture.num_experts}; found {mixture.top_k}.")
    if mixture.top_k == 1 and mixture.norm_topk_prob:
        raise SettingsError(
            "norm_topk_prob must be False where num_experts_per_tok is 1: an expert's share would be 1 whatever the "
            "router says, and the router would never learn."
        )
    return mixture


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters; before, rope_scaling beside rope_theta.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {}


def _rope_scaling(rope: Mapping[str, Any]) -> LinearRopeScaling | Llama3RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        return LinearRopeScaling(factor=_finite(rope["factor"]))
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=_finite(rope["factor"]),
            low_freq_factor=_finite(rope["low_freq_factor"]),
            high_freq_factor=_finite(rope["high_freq_factor"]),
            original_max_position_embeddings=_count(rope, "original_max_position_embeddings"),
        )
    if kind != "default":
        raise SettingsError(
            f"rope_type {shown(kind)} is not supported by the learners; supported: default, linear, llama3. "
            "Remove the scaling from config.json to train on lengths that need none."
        )
    return None


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    # json's null is the same as no field.
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    expected: dict[str, tuple[Any, Any]] = {
        "hidden_act": (config.get("hidden_act") or "silu", "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        "use_sliding_window": (bool(config.get("use_sliding_window")), False),
        "layer_types": (min(layer_types, default="full_attention"), "full_attention"),
        "partial_rotary_factor": (float(_rope(config).get("partial_rotary_factor") or 1.0), 1.0),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise SettingsError(f"{name} must be {wanted!r} for the learners; config.json has {shown(found)}.")
