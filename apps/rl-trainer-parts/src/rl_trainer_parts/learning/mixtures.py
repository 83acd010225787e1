"""A model's configuration; whether rollouts record each token's experts, and the learner of a mixture replays them."""

import json
from pathlib import Path
from typing import Literal

from rl_core.errors import RLError
from rl_distill import PolicyConfig, parse_policy_config, read_policy_config
from rl_trainer_parts.learning.engine_choice import engine_name
from rl_trainer_parts.settings.schema import Settings

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of config.json with the number of experts, for architectures that transformers' class computes."""


def model_config(folder: Path, backend: Literal["auto", "megatron", "transformers", "torch"] = "auto") -> PolicyConfig:
    """The configuration of a Hugging Face folder's model.

    Args:
        folder: The folder.
        backend: What computes the model; "torch" trains the architectures of "megatron".

    Raises:
        DataError: The folder has none, or one of its fields cannot be used.
        SettingsError: The architecture is not supported.
    """
    return parse_policy_config(read_policy_config(folder), backend="megatron" if backend == "torch" else backend)


def learner_name(settings: Settings) -> str:
    """What computes the policy in training: "megatron", "transformers" or "torch"; the setting if it cannot be read."""
    backend = settings.policy.backend
    if backend != "auto":
        return backend
    try:
        return "transformers" if model_config(settings.policy.path).model_json else "megatron"
    except RLError:  # the checks report it
        return backend


def expert_shape(settings: Settings) -> tuple[int, int] | None:
    """Layers and experts per token that rollouts record for the learner; None if they record none."""
    return _mixture_shape(settings) if settings.distillation.texts is None and replays(settings) else None


def replays(settings: Settings) -> bool:
    """True for a mixture whose learner replays the engine's routing."""
    return not why_not_replayed(settings) and _mixture_shape(settings) is not None


def routes_anew(settings: Settings) -> bool:
    """True for a mixture whose learner does not replay the routing."""
    return bool(why_not_replayed(settings)) and _is_mixture(settings)


def why_not_replayed(settings: Settings) -> str:
    """Why a mixture's learner does not replay the routing, by setting; "" if it does."""
    if settings.policy.backend in ("torch", "transformers"):
        return f'policy.backend = "{settings.policy.backend}" cannot replay routing; "megatron" can'
    if learner_name(settings) == "transformers":
        return "transformers' class, which computes this architecture, cannot replay routing"
    if (engine := engine_name(settings)) != "vllm":
        return f'rollout.engine = "{engine}" does not report routing; "vllm" does'
    return "" if settings.vllm.capture_experts else "vllm.capture_experts = false"


def _is_mixture(settings: Settings) -> bool:
    try:
        config = model_config(settings.policy.path, settings.policy.backend)
    except RLError:  # the checks report it
        return False
    fields = json.loads(config.model_json or "{}")
    return config.mixture is not None or any((fields.get(name) or 0) > 1 for name in EXPERT_COUNTS)


def _mixture_shape(settings: Settings) -> tuple[int, int] | None:
    try:
        config = model_config(settings.policy.path, settings.policy.backend)
    except RLError:  # the checks report it
        return None
    return None if config.mixture is None else (config.num_layers, config.mixture.top_k)
