"""Rollouts: prompts, engines, agent loops and rewards. Importing this loads no engine and no torch."""

from rl_rollout.audit import AuditOptions
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.loops import LoopContext, SessionLoop, SessionResult, SingleTurnLoop, resolve_loop
from rl_rollout.prompts import PromptOptions, PromptSet, PromptSource, PromptTokenizer, load_prompts
from rl_rollout.refill import resolve_filter
from rl_rollout.rewards import RewardInput, RewardResult, RewardScorer, quick, resolve_reward
from rl_rollout.rollout import GroupResult, Rollout, RolloutOptions, can_score_again, require_some_success
from rl_rollout.tools import tool

__all__ = [
    "AuditOptions",
    "GenerateRequest",
    "Generation",
    "GroupResult",
    "LoopContext",
    "PromptOptions",
    "PromptSet",
    "PromptSource",
    "PromptTokenizer",
    "RewardInput",
    "RewardResult",
    "RewardScorer",
    "Rollout",
    "RolloutEngine",
    "RolloutOptions",
    "SamplingParams",
    "SessionLoop",
    "SessionResult",
    "SingleTurnLoop",
    "can_score_again",
    "load_prompts",
    "quick",
    "require_some_success",
    "resolve_filter",
    "resolve_loop",
    "resolve_reward",
    "tool",
]
