"""Engines by name; another package adds one with the entry point group `rl_rollout.engines`."""

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
    """All names, sorted."""
    return _ENGINES.names()


def engine_class(name: str) -> Any:
    """The engine of this name, imported now; most take a model folder and options.

    Raises:
        SettingsError: Nothing has this name; the message lists what has.
    """
    return _ENGINES.get(name)
