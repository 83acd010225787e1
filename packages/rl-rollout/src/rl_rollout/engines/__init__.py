"""Engines: what generates. Importing this loads no engine; take each from its own module."""

from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, RolloutEngine, SamplingParams

__all__ = ["EngineTraits", "GenerateRequest", "Generation", "RolloutEngine", "SamplingParams"]
