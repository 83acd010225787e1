"""Read a Hugging Face config.json, and choose what computes the model: our parallel layers, or transformers' class."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import DataError, RLError, SettingsError
from rl_core.files import preview, read_json_object
from rl_core.record_fields import converts_arguments, settings_record
from rl_distill.architecture.mixture_config import (
    ExpertChoice,
    MixtureConfig,
    count,
    finite,
    read_mixture,
    refuse_router_losses,
)
from rl_distill.architecture.transformers_model import (
    canonical_json,
    check_fields,
    checked_class,
    default_router_loss,
    dimensions,
    has_experts,
    image_token_id,
    model_tied,
)

ModelBackend = Literal["auto", "megatron", "transformers"]
"""What computes a model: "megatron" our layers, which ranks can divide; "transformers" its own class. "auto" prefers
the first."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Properties that all models of one architecture share.

    Attributes:
        model_type: The name of the architecture in transformers.
        has_qkv_bias: True if queries, keys and values have a bias; None if config.json decides (attention_bias).
        has_qk_norm: True if queries and keys are normalized per head; None if config.json decides (use_qk_norm).
        experts: How mixture layers score experts; None if the architecture has none.
        default_head_dim: Head size if config.json has none; None for hidden_size / num_attention_heads.
        default_rotary_factor: Rotated share of a head if config.json has none; None if every head is rotated in full.
    """

    model_type: str = ""
    has_qkv_bias: bool | None = False
    has_qk_norm: bool | None = False
    experts: ExpertChoice | None = None
    default_head_dim: int | None = None
    default_rotary_factor: float | None = None


FAMILIES = {
    "Qwen3ForCausalLM": ModelFamily("qwen3", has_qk_norm=True, default_head_dim=128),
    "Qwen3MoeForCausalLM": ModelFamily("qwen3_moe", has_qk_norm=True, experts="softmax"),
    "Qwen2ForCausalLM": ModelFamily("qwen2", has_qkv_bias=True),
    "LlamaForCausalLM": ModelFamily("llama"),
    "Glm4MoeForCausalLM": ModelFamily(
        "glm4_moe", has_qkv_bias=None, has_qk_norm=None, experts="sigmoid", default_rotary_factor=0.5
    ),
}
"""Families by the architecture in config.json. Qwen2ForCausalLM includes Qwen2.5; Glm4Moe includes GLM-4.5 to 4.7."""

_LATER = (
    *(
        "attention_bias",
        "use_qk_norm",
        "rotary_dim",
        "shared_ffn_hidden_size",
        "sigmoid",
        "model_json",
        "trains_vision",
    ),
)
"""Fields that the digest omits when empty, so that it still matches older checkpoints."""

BOUNDED_FIELDS = frozenset(
    {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
    | {"vocab_size", "max_position_embeddings", "n_layer", "n_embd", "n_head", "num_experts", "num_local_experts"}
    | {"n_routed_experts", "moe_intermediate_size"}
)
"""Fields whose size bounds the time to build a class's model."""

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
"""Architectures with layers that ranks can divide. All others are computed by transformers' classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Linear RoPE scaling.

    Attributes:
        factor: Divisor of every position.
    """

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3's RoPE scaling of long wavelengths.

    Attributes:
        factor: Divisor of the frequencies with long wavelengths.
        low_freq_factor: Wavelengths above the original length divided by this factor are long.
        high_freq_factor: Wavelengths below the original length divided by this factor are unchanged.
        original_max_position_embeddings: Original context length in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@settings_record
class PolicyConfig:
    """Shape of a decoder-only model.

    Attributes:
        architecture: Name of the class in config.json.
        num_layers: Number of decoder layers.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the gated feed-forward part in dense layers.
        num_heads: Number of query heads.
        num_key_value_heads: Number of key and value heads.
        head_dim: Size of a head.
        vocab_size: Number of rows of the embedding.
        max_position_embeddings: Maximum sequence length in tokens.
        norm_eps: Epsilon of the RMS norms.
        rope_base: Base of the rotary embedding.
        rope_scaling: Scaling of the rotary embedding; None for none.
        is_tied: True if the head shares the embedding's weights.
        initializer_range: Standard deviation of random weights.
        mixture: Mixture-of-experts layers; None for a dense policy.
        attention_bias: True if config.json adds a bias to queries, keys and values.
        use_qk_norm: True if config.json adds norms to queries and keys.
        rotary_dim: Number of leading channels of a head that are rotated; 0 for all.
        model_json: `canonical_json` of a model that transformers' class computes; empty for our layers. The fields of
            norms, rotary embedding and mixture then say nothing.
        trains_vision: True if the vision tower and projector of `model_json` are trained, not only its language layers.
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
    attention_bias: bool = False
    use_qk_norm: bool = False
    rotary_dim: int = 0
    model_json: str = ""
    trains_vision: bool = False

    @property
    def family(self) -> ModelFamily:
        """Family of the architecture."""
        return FAMILIES.get(self.architecture, ModelFamily())

    @property
    def has_qkv_bias(self) -> bool:
        """True if queries, keys and values have a bias."""
        return self.family.has_qkv_bias or self.attention_bias

    @property
    def has_qk_norm(self) -> bool:
        """True if queries and keys are normalized per head."""
        return self.family.has_qk_norm or self.use_qk_norm

    @property
    def is_routed_by_class(self) -> bool:
        """True for a mixture of experts that transformers' class computes, whose routing cannot be replayed."""
        return bool(self.model_json) and has_experts(self.model_json)

    @property
    def image_token_id(self) -> int | None:
        """Id of the tokens whose embeddings an image replaces; None for a policy without images."""
        return image_token_id(self.model_json) if self.model_json else None

    @property
    def num_experts(self) -> int:
        """Routed experts per mixture layer; 0 for a dense policy."""
        return 0 if self.mixture is None else self.mixture.num_experts

    def is_mixture(self, layer: int) -> bool:
        """Return whether the layer with this index is a mixture of experts."""
        return self.mixture is not None and layer in self.mixture.layers

    @property
    def digest(self) -> str:
        """Fingerprint of everything that weights must match."""

        def kept(fields: dict[str, Any]) -> dict[str, Any]:
            said = {name: value for name, value in fields.items() if value or name not in _LATER}
            return {name: kept(value) if isinstance(value, dict) else value for name, value in said.items()}

        fields = kept({name: value for name, value in asdict(self).items() if name != "initializer_range"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tied(self) -> dict[str, str]:
        """Names of tied tensors, each mapped to the tensor whose values it shares."""
        if self.model_json:
            return model_tied(self.model_json)
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.is_tied else {}


@converts_arguments
def read_policy_config(policy_dir: Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face model folder.

    Raises:
        DataError: The file is missing, or is not a JSON object.
    """
    path = policy_dir / "config.json"
    if not os.path.lexists(path):
        raise DataError(f"{path} does not exist. Pass a Hugging Face model folder.")
    return read_json_object(path)


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Refuse a config.json of quantized weights, which cannot be trained.

    Raises:
        SettingsError: It has a field that describes their quantization.
    """
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            raise SettingsError(
                f"config.json has {name}, and quantized weights cannot be trained; found {preview(config[name])}. Use "
                "the model's folder in bfloat16, or convert the weights and remove the field."
            )


def parse_policy_config(config: Mapping[str, Any], *, backend: ModelBackend = "auto") -> PolicyConfig:
    """Parse the content of a config.json.

    Args:
        config: The content.
        backend: What computes the model. "auto" uses our layers for SUPPORTED_ARCHITECTURES, unless config.json has an
            option that only transformers' class computes.

    Raises:
        SettingsError: The architecture or one of its options is not supported.
        DataError: A field is missing or out of range.
    """
    named = config.get("architectures") or ["(none)"]
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named) or not named[0].isprintable():
        raise DataError(f"config.json must have the names of classes as architectures; found {preview(named)}.")
    architecture: str = named[0]
    if backend == "megatron" and architecture not in FAMILIES:
        raise SettingsError(
            f"architecture {architecture[:80]} is not computed by our layers, which have "
            f'{", ".join(SUPPORTED_ARCHITECTURES)}. Set policy.backend = "auto".'
        )
    try:
        if backend == "transformers" or architecture not in FAMILIES:
            return _transformers_config(config, architecture)
        _refuse_unsupported(config, FAMILIES[architecture])
        return _policy_config(config, architecture)
    except _OtherLayersError:
        if backend == "megatron":
            raise
        return _transformers_config(config, architecture)
    except RLError:
        raise
    except KeyError as error:
        raise DataError(f"config.json has no field {error}, which {architecture} requires.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise DataError(f"config.json has a field of the wrong type: {error}.") from error


class _OtherLayersError(SettingsError):
    """Our layers do not compute an option that transformers' class may compute."""


def _transformers_config(config: Mapping[str, Any], architecture: str) -> PolicyConfig:
    check_fields(config)
    text = canonical_json(config)
    for name in BOUNDED_FIELDS & config.keys():
        if type(config[name]) is int and config[name] != 0:
            count(config, name)
    architecture = checked_class(text, architecture)
    refuse_router_losses(config, default_coef=default_router_loss(text))
    return PolicyConfig(architecture=architecture, model_json=text, **dimensions(text))


def _policy_config(config: Mapping[str, Any], architecture: str) -> PolicyConfig:
    family = FAMILIES[architecture]
    num_heads, hidden_size = count(config, "num_attention_heads"), count(config, "hidden_size")
    groups = count(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else num_heads
    if num_heads % groups:
        raise DataError(
            f"num_attention_heads must be divisible by num_key_value_heads; found {num_heads} and {groups}."
        )
    head_dim = family.default_head_dim or hidden_size // num_heads
    if config.get("head_dim") is not None:
        head_dim = count(config, "head_dim")
    rope = _rope(config)
    return PolicyConfig(
        architecture=architecture,
        num_layers=count(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=count(config, "intermediate_size"),
        num_heads=num_heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=count(config, "vocab_size"),
        max_position_embeddings=count(config, "max_position_embeddings"),
        norm_eps=finite(config["rms_norm_eps"]),
        rope_base=_positive("rope_theta", _first(rope.get("rope_theta"), config.get("rope_theta"), 10000.0)),
        rope_scaling=_rope_scaling({"original_max_position_embeddings": config["max_position_embeddings"], **rope}),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        initializer_range=finite(config.get("initializer_range", 0.02)),
        mixture=None if family.experts is None else read_mixture(config, family.experts),
        attention_bias=family.has_qkv_bias is None and bool(config.get("attention_bias")),
        use_qk_norm=family.has_qk_norm is None and bool(config.get("use_qk_norm")),
        rotary_dim=_rotary_dim(config, head_dim, family.default_rotary_factor),
    )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters; earlier versions write rope_scaling, which it prefers, and rope_theta.
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if not isinstance(rope, Mapping | None) or any(isinstance(value, Mapping) for value in (rope or {}).values()):
            raise DataError(
                f"config.json must have one object of numbers and strings as {name}, for all layers; found "
                f"{preview(rope)}."
            )
        if rope:
            return rope
    return {}


def _first(*values: Any) -> Any:
    """Return the first value that is given; a null in config.json means the same as a missing field."""
    return next((value for value in values if value is not None), None)


def _positive(name: str, value: Any) -> float:
    """Return a field as a finite float above 0.

    Raises:
        DataError: The value is not above 0.
    """
    number = finite(value)
    if number <= 0 or isinstance(value, bool):
        raise DataError(f"config.json must have {name} above 0; found {preview(value)}.")
    return number


def _rotary_dim(config: Mapping[str, Any], head_dim: int, default: float | None) -> int:
    """Return the rotated channels of a head; 0 for all. transformers 4 has the factor at the top level of the file."""
    name = "partial_rotary_factor"
    factor = _positive(name, _first(_rope(config).get(name), config.get(name), default, 1))
    rotary_dim = int(head_dim * factor)
    if factor != 1 and default is None:
        raise _OtherLayersError(f"partial_rotary_factor must be 1.0 for this architecture; config.json has {factor}.")
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise DataError(
            f"partial_rotary_factor must rotate an even number of the {head_dim} channels of a head; found {factor}."
        )
    return rotary_dim % head_dim


def _rope_scaling(rope: Mapping[str, Any]) -> LinearRopeScaling | Llama3RopeScaling | None:
    kind = _first(rope.get("rope_type"), rope.get("type"), "default")
    if kind == "linear":
        return LinearRopeScaling(factor=_positive("factor", rope["factor"]))
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=_positive("factor", rope["factor"]),
            low_freq_factor=_positive("low_freq_factor", rope["low_freq_factor"]),
            high_freq_factor=_positive("high_freq_factor", rope["high_freq_factor"]),
            original_max_position_embeddings=count(rope, "original_max_position_embeddings"),
        )
    if kind != "default":
        raise _OtherLayersError(
            f"rope_type {preview(kind)} is not supported by our layers. Supported: default, linear, llama3. "
            "To train on lengths that do not need scaling, remove it from config.json."
        )
    return None


def _refuse_unsupported(config: Mapping[str, Any], family: ModelFamily) -> None:
    # A null in config.json means the same as a missing field.
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    expected: dict[str, tuple[Any, Any]] = {
        "model_type": (config.get("model_type") or family.model_type, family.model_type),
        "hidden_act": (config.get("hidden_act") or "silu", "silu"),
        "attention_bias": (bool(config.get("attention_bias")) and family.has_qkv_bias is not None, False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        "use_sliding_window": (bool(config.get("use_sliding_window")), False),
        "layer_types": (min(layer_types, default="full_attention"), "full_attention"),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise _OtherLayersError(f"{name} must be {wanted!r} for the learners; config.json has {preview(found)}.")
