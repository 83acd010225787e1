"""Settings become an engine, in this process or in one of its own."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rl_rollout.engines.options import TransformersOptions, VLLMOptions
from rl_rollout.engines.protocol import RolloutEngine
from rl_rollout.engines.registry import engine_class
from rl_sync_trainer.settings import Settings


def make_engine(settings: Settings, policy: Path) -> RolloutEngine:
    """The engine of the settings on a Hugging Face folder; its `start` loads it."""
    name = settings.rollout.engine
    options = engine_options(settings)
    if settings.rollout.placement == "process":
        from rl_rollout.engines.process import EngineHost, ProcessEngine

        return ProcessEngine(name, policy, options, host=EngineHost(deadline_s=settings.rollout.start_deadline_s))
    engine: RolloutEngine = engine_class(name)(policy, options)
    return engine


def engine_options(settings: Settings) -> Any:
    """The options of the engine that is named, with the context that this run needs."""
    longest = settings.prompts.max_tokens + settings.rollout.max_response_tokens
    options = replace(settings.engine, max_model_len=settings.engine.max_model_len or longest)
    if settings.rollout.engine != "transformers":
        return options
    shared = {field.name for field in fields(TransformersOptions)} & {field.name for field in fields(VLLMOptions)}
    return TransformersOptions(**{name: getattr(options, name) for name in shared})
