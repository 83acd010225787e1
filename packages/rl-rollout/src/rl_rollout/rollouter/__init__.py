"""The rollouter: engines, agent loop and rewards as a role that puts complete groups into a queue."""

from rl_rollout.rollouter.group_events import Dispatch, GroupEvent, Refusals, is_refused, queued_event, refusal, settle
from rl_rollout.rollouter.rollouter import Rollouter, RollouterOptions, RolloutWindow
from rl_rollout.rollouter.served_policy import PolicyScores, policy_scores

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
