"""The engine that serves the policy."""

from rl_rollout.engines import EngineChoice, choose_engine
from rl_trainer_parts.settings.schema import Settings


def engine_choice(settings: Settings) -> EngineChoice:
    """The engine that serves the policy, and why, if `rollout.engine` leaves the choice."""
    named = settings.rollout.engine
    if named != "auto":
        return EngineChoice(name=named, reason="")
    if settings.cluster.ray_address is not None:
        return EngineChoice(name="vllm", reason="the machines of the cluster are expected to have vLLM")
    return choose_engine(settings.policy.path, dtype=settings.vllm.dtype)


def engine_name(settings: Settings) -> str:
    """Name of the engine that serves the policy: "vllm", "transformers" or another package's."""
    return engine_choice(settings).name
