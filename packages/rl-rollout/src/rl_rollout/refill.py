"""Dynamic sampling: replace groups without a training signal by groups of other prompts, in limited rounds."""

from collections.abc import Awaitable, Callable, Sequence

from rl_core.data import Prompt
from rl_core.errors import DataError
from rl_core.record_fields import PositiveInt, converts_arguments, record, settings_record
from rl_rollout.filters import GroupFilter
from rl_rollout.rollout import GroupResult


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
