"""Dynamic sampling: filters refuse groups without a training signal, and groups of other prompts replace them.

Packages add filters with the entry point group `rl_rollout.filters`.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl_core.data import Prompt, are_equal_rewards
from rl_core.errors import DataError, SettingsError
from rl_core.record_fields import PositiveInt, converts_arguments, record, settings_record
from rl_core.registry import Registry
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult
from rl_rollout.user_code import find_in

GroupFilter = Callable[[GroupResult], str | None]
"""Returns a short reason why a group must not train, or None to keep it."""

FILTERS: Registry[Any] = Registry(
    "group filter",
    {"reward_spread": "rl_rollout.refill:reward_spread"},
    group="rl_rollout.filters",
)


def reward_spread(group: GroupResult) -> str | None:
    """Refuse a group whose sessions all have the same reward, because its advantages are zero (DAPO, 2025).

    A session's reward is that of its last trajectory. Sessions without a finite reward are ignored. With a greedy
    baseline, a group is refused if this is the same too.
    """
    last = [session.trajectories[-1] for session in group.sessions if _trains(session)]
    if not last:
        return "no session can train"
    rewards = [row.reward or 0.0 for row in last]
    rewards += [row.reward_baseline for row in last if row.reward_baseline is not None]
    return f"every session has the reward {rewards[0]}" if are_equal_rewards(min(rewards), max(rewards)) else None


def resolve_filter(reference: str) -> GroupFilter:
    """Return the group filter with this name, or the one at `path.py:function`.

    Raises:
        SettingsError: No such name, file or function exists.
    """
    function: GroupFilter = find_in(FILTERS, reference)
    if not callable(function):
        raise SettingsError(f"group filter {reference!r} must be a function of one GroupResult; found {function!r}.")
    return function


def _trains(session: SessionResult) -> bool:
    if session.failure is not None or not session.trajectories:
        return False
    reward = session.trajectories[-1].reward
    return reward is not None and math.isfinite(reward)


@settings_record
class RefillOptions:
    """Options of dynamic sampling, which replaces groups that a filter refuses.

    Attributes:
        filter: Which groups to keep: "reward_spread" (groups whose rewards differ), the name of a filter that another
            package installs, or `path.py:function`. Empty keeps all groups.
        max_rounds: Maximum number of generation rounds per step, including the first. After the last round, refused
            groups fill the missing places.
    """

    filter: str = ""
    max_rounds: PositiveInt = 4


@record
class Refilled:
    """The result of all generation rounds.

    Attributes:
        groups: Groups to train on, at most as many as wanted. Kept groups come first, then refused groups that fill
            missing places, each in the order of their prompts.
        refused: Groups that do not train, with the reason.
        failed: Groups whose sessions all failed.
        num_rounds: Number of generation rounds.
        num_made_up: Number of `groups` that the filter had refused.
    """

    groups: tuple[GroupResult, ...]
    refused: tuple[tuple[GroupResult, str], ...]
    failed: tuple[GroupResult, ...]
    num_rounds: int
    num_made_up: int


@converts_arguments
async def refill(
    run: Callable[[Sequence[Prompt]], Awaitable[Sequence[GroupResult]]],
    take: Callable[[int], Sequence[Prompt]],
    *,
    wanted: PositiveInt,
    keep: GroupFilter,
    max_rounds: PositiveInt,
) -> Refilled:
    """Run groups of prompts until the filter has kept enough of them.

    Args:
        run: Runs all sessions of prompts, such as `Rollout.run` with its arguments.
        take: Returns the next prompts.
        wanted: Number of groups to train on.
        keep: See `GroupFilter`.
        max_rounds: Maximum number of calls of `run`.

    Raises:
        SettingsError: wanted or max_rounds is below 1.
        DataError: The filter raised.
    """
    kept: list[GroupResult] = []
    refused: list[tuple[GroupResult, str]] = []
    failed: list[GroupResult] = []
    num_rounds = 0
    while len(kept) < wanted and num_rounds < max_rounds:
        num_rounds += 1
        for group in await run(take(wanted - len(kept))):
            if not group.trajectories:
                failed.append(group)
            elif (reason := _reason(keep, group)) is None:
                kept.append(group)
            else:
                refused.append((group, reason))
    missing = wanted - len(kept)
    made_up = [group for group, _ in refused[:missing]]
    return Refilled(
        groups=(*kept, *made_up),
        refused=tuple(refused[len(made_up) :]),
        failed=tuple(failed),
        num_rounds=num_rounds,
        num_made_up=len(made_up),
    )


def _reason(keep: GroupFilter, group: GroupResult) -> str | None:
    try:
        reason = keep(group)
    except Exception as error:
        raise DataError(
            f"the group filter raised {type(error).__name__}: {error} for prompt {group.prompt.uid}. It must return "
            "None to keep a group, or a reason to refuse it."
        ) from error
    if reason is not None and not isinstance(reason, str):
        raise DataError(
            "the group filter must return None to keep a group, or a string with the reason to refuse it; found "
            f"{reason!r} for prompt {group.prompt.uid}."
        )
    return reason
