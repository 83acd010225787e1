"""A model's configuration; whether rollouts record each token's experts, and the learner of a mixture replays them."""

from pathlib import Path

from rl_core.errors import RLError
from rl_distill import ModelBackend, PolicyConfig, parse_policy_config, read_policy_config
from rl_trainer_parts.settings.schema import Settings


def model_config(folder: Path, backend: ModelBackend = "auto") -> PolicyConfig:
    """The configuration of a Hugging Face folder's model.

    Args:
        folder: The folder.
        backend: What computes the model.

    Raises:
        DataError: The folder has none, or one of its fields cannot be used.
        SettingsError: The architecture is not supported.
    """
    return parse_policy_config(read_policy_config(folder), backend=backend)


def learner_name(settings: Settings) -> str:
    """What computes the policy in training: "megatron" or "transformers"; the setting if it cannot be read."""
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
    return bool(why_not_replayed(settings)) and _mixture_shape(settings) is not None


def why_not_replayed(settings: Settings) -> str:
    """Why a mixture's learner does not replay the routing, by setting; "" if it does."""
    if settings.policy.backend == "transformers":
        return f'policy.backend = "{settings.policy.backend}" cannot replay routing; "megatron" can'
    if settings.rollout.engine != "vllm":
        return f'rollout.engine = "{settings.rollout.engine}" does not report routing; "vllm" does'
    return "" if settings.vllm.capture_experts else "vllm.capture_experts = false"


def _mixture_shape(settings: Settings) -> tuple[int, int] | None:
    try:
        config = model_config(settings.policy.path, settings.policy.backend)
    except RLError:  # the checks report it
        return None
    return None if config.mixture is None else (config.num_layers, config.mixture.top_k)
