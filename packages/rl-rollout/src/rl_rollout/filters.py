"""Filters that select groups for training. Packages add filters with the entry point group `rl_rollout.filters`."""

import math
from collections.abc import Callable
from typing import Any

from rl_core.data import are_equal_rewards
from rl_core.errors import SettingsError
from rl_core.registry import Registry
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult
from rl_rollout.user_files import find_in

GroupFilter = Callable[[GroupResult], str | None]
"""Returns a short reason why a group must not train, or None to keep it."""

FILTERS: Registry[Any] = Registry(
    "group filter",
    {"reward_spread": "rl_rollout.filters:reward_spread"},
    group="rl_rollout.filters",
)


def reward_spread(group: GroupResult) -> str | None:
    """Refuse a group whose sessions all have the same reward, because its advantages are zero (DAPO, 2025).

    A session's reward is that of its last trajectory. Sessions without a finite reward are ignored.
    """
    rewards = [session.trajectories[-1].reward or 0.0 for session in group.sessions if _trains(session)]
    if not rewards:
        return "no session can train"
    return f"every session has the reward {rewards[0]}" if are_equal_rewards(min(rewards), max(rewards)) else None


def resolve_filter(reference: str) -> GroupFilter:
    """Return the group filter with this name, or the one at `path.py:function`.

    Raises:
        SettingsError: No such name, file or function exists.
    """
    found = find_in(FILTERS, reference)
    if not callable(found):
        raise SettingsError(f"group filter {reference!r} must be a function of one GroupResult; found {found!r}.")
    return found  # type: ignore[no-any-return]


def _trains(session: SessionResult) -> bool:
    if session.failure is not None or not session.trajectories:
        return False
    reward = session.trajectories[-1].reward
    return reward is not None and math.isfinite(reward)
