"""Engines that generate responses. Importing this package loads no engine; import each from its own module."""

from rl_core.weights import TokenScores
from rl_rollout.engines.choice import EngineChoice, choose_engine
from rl_rollout.engines.model_folder import (
    end_token_ids,
    max_positions,
    model_end_tokens,
    takes_images,
    vocabulary_size,
)
from rl_rollout.engines.options import TransformersOptions, VLLMOptions, engine_class, known_engines
from rl_rollout.engines.process import EnginePlacement, ProcessEngine
from rl_rollout.engines.protocol import (
    EngineTraits,
    GenerateRequest,
    Generation,
    NewTokens,
    RolloutEngine,
    SamplingParams,
    Structure,
)
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.replicas.replica import EngineLoad
from rl_rollout.engines.response_text import ResponseText
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.engines.streaming import stream

__all__ = [
    "EngineChoice",
    "EngineLoad",
    "EnginePlacement",
    "EngineTraits",
    "GenerateRequest",
    "Generation",
    "NewTokens",
    "ProcessEngine",
    "ReplicatedEngine",
    "ResponseText",
    "RolloutEngine",
    "SamplingParams",
    "ScriptedEngine",
    "Structure",
    "TokenScores",
    "TransformersOptions",
    "VLLMOptions",
    "choose_engine",
    "end_token_ids",
    "engine_class",
    "known_engines",
    "max_positions",
    "model_end_tokens",
    "stream",
    "takes_images",
    "vocabulary_size",
]
