"""Engines by name. Other packages add engines with the entry point group `rl_rollout.engines`."""

from typing import Any

from rl_core.registry import Registry

_ENGINES: Registry[Any] = Registry(
    "engine",
    {
        "vllm": "rl_rollout.engines.vllm:VLLMEngine",
        "transformers": "rl_rollout.engines.transformers:TransformersEngine",
        "scripted": "rl_rollout.engines.scripted:ScriptedEngine",
    },
    group="rl_rollout.engines",
)


def known_engines() -> list[str]:
    """Return all names, sorted."""
    return _ENGINES.names()


def engine_class(name: str) -> Any:
    """Import and return the engine class of this name. Most take a model folder and options.

    Raises:
        SettingsError: The name is unknown. The message lists the known names.
    """
    return _ENGINES.get(name)
