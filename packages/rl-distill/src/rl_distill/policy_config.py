"""What a Hugging Face config.json says about a policy, checked for what the learners support."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, SettingsError

SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM",)
"""Architectures that the learners train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Shape of a dense Qwen3 decoder.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the gated feed-forward layer.
        num_heads: Query heads.
        num_key_value_heads: Key and value heads.
        head_dim: Size of a head.
        vocab_size: Rows of the embedding.
        max_position_embeddings: Longest sequence that the model was made for.
        norm_eps: Of the RMS norms.
        rope_base: Base of the rotary embedding.
        is_tied: True when the head is the embedding.
        initializer_range: Standard deviation of random weights.
    """

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
    is_tied: bool
    initializer_range: float

    @property
    def digest(self) -> str:
        """Fingerprint of everything that weights must agree with."""
        fields = {name: value for name, value in asdict(self).items() if name != "initializer_range"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tied(self) -> dict[str, str]:
        """Names served from another tensor."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.is_tied else {}


def read_policy_config(policy_dir: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises:
        DataError: The file is missing or no JSON object.
    """
    path = policy_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give a Hugging Face model folder.") from None
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} must hold a JSON object; found {type(config).__name__}.")
    return config


def parse_policy_config(config: Mapping[str, Any]) -> PolicyConfig:
    """Understand a config.json.

    Raises:
        SettingsError: The architecture, or something in it, is not supported.
        DataError: A field is missing.
    """
    architectures = config.get("architectures") or ["(none)"]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise SettingsError(
            f"architecture {architectures[0]} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    rope = _rope(config)
    _refuse_unsupported(config, rope)
    try:
        return PolicyConfig(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            ffn_hidden_size=int(config["intermediate_size"]),
            num_heads=int(config["num_attention_heads"]),
            num_key_value_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            initializer_range=float(config.get("initializer_range", 0.02)),
        )
    except KeyError as error:
        raise DataError(f"config.json has no field {error}; a {architectures[0]} needs it.") from None


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters; before, rope_scaling beside rope_theta.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {}


def _refuse_unsupported(config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    expected: dict[str, tuple[Any, Any]] = {
        "rope_type": (rope_type, "default"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), False),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise SettingsError(f"{name} must be {wanted!r} for the learners; config.json has {found!r}.")
