"""Rollouts: prompts, engines, agent loops and rewards. Importing this loads no engine and no torch."""

from rl_rollout.audit import AuditOptions, SampledSpan, audit_trajectory
from rl_rollout.engines.protocol import (
    EngineTraits,
    GenerateRequest,
    Generation,
    RolloutEngine,
    SamplingParams,
    TokenScores,
)
from rl_rollout.filters import resolve_filter
from rl_rollout.loops import (
    AgentLoop,
    LoopContext,
    SessionLoop,
    SessionResult,
    SingleTurnLoop,
    resolve_loop,
)
from rl_rollout.prompts import PromptOptions, PromptSet, PromptSource, PromptTokenizer, load_prompts
from rl_rollout.rescoring import can_score_again
from rl_rollout.rewards import (
    MathVerify,
    RewardFunction,
    RewardInput,
    RewardResult,
    RewardScorer,
    Scored,
    quick,
    resolve_reward,
)
from rl_rollout.rollout import GroupResult, Rollout, RolloutOptions, require_some_success
from rl_rollout.tools import Tool, tool

__all__ = [
    "AgentLoop",
    "AuditOptions",
    "EngineTraits",
    "GenerateRequest",
    "Generation",
    "GroupResult",
    "LoopContext",
    "MathVerify",
    "PromptOptions",
    "PromptSet",
    "PromptSource",
    "PromptTokenizer",
    "RewardFunction",
    "RewardInput",
    "RewardResult",
    "RewardScorer",
    "Rollout",
    "RolloutEngine",
    "RolloutOptions",
    "SampledSpan",
    "SamplingParams",
    "Scored",
    "SessionLoop",
    "SessionResult",
    "SingleTurnLoop",
    "TokenScores",
    "Tool",
    "audit_trajectory",
    "can_score_again",
    "load_prompts",
    "quick",
    "require_some_success",
    "resolve_filter",
    "resolve_loop",
    "resolve_reward",
    "tool",
]

__version__ = "0.1.0"
