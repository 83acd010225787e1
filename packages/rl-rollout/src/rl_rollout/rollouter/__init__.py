"""The rollouter: engines, agent loop and rewards as a role that puts complete groups into a queue."""

from rl_rollout.rollouter.group_events import Dispatch, GroupEvent, Refusals, is_refused, queued_event, refusal
from rl_rollout.rollouter.rollouter import Rollouter, RollouterOptions
from rl_rollout.rollouter.served_policy import PolicyScores, policy_scores
from rl_rollout.rollouter.settling import settle
from rl_rollout.rollouter.window import RolloutWindow

__all__ = [
    "Dispatch",
    "GroupEvent",
    "PolicyScores",
    "Refusals",
    "RolloutWindow",
    "Rollouter",
    "RollouterOptions",
    "is_refused",
    "policy_scores",
    "queued_event",
    "refusal",
    "settle",
]
