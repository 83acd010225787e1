"""New rewards for sessions that ended long ago, such as those of a skip cache."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_core.errors import SettingsError
from rl_rollout.loops.outcomes import check_sessions
from rl_rollout.loops.protocol import AgentLoop, Judged, LoopContext, SessionResult, loop_name
from rl_rollout.loops.single_turn import with_reward
from rl_rollout.rewards.scorer import reward_input

if TYPE_CHECKING:
    from rl_rollout.rollout import GroupResult


def can_score_again(loop: AgentLoop | type[AgentLoop]) -> bool:
    """True when a loop, or a class of loops, can tell from a stored session what its reward judges."""
    return callable(getattr(loop, "judged", None))


async def score_groups_again(
    groups: Sequence["GroupResult"], *, loop: AgentLoop, context: LoopContext
) -> list["GroupResult"]:
    """The same trajectories with the rewards that the context's scorer gives now.

    Sessions that failed stay as they are; extras of the earlier reward stay where the new one gives none of that name.

    Raises:
        SettingsError: The loop cannot tell from a session what its reward judges.
    """
    judged: Callable[[SessionResult, LoopContext], Judged] | None = getattr(loop, "judged", None)
    if judged is None:
        raise SettingsError(
            f"{loop_name(loop)} cannot tell from a stored session what its reward judges (it has no `judged`). Keep "
            "the stored rewards, or generate anew."
        )
    return list(await asyncio.gather(*(_score_group(group, judged, loop, context) for group in groups)))


async def _score_group(
    group: "GroupResult",
    judged: Callable[[SessionResult, LoopContext], Judged],
    loop: AgentLoop,
    context: LoopContext,
) -> "GroupResult":
    finished = [session for session in group.sessions if session.failure is None]
    responses = [judged(session, context) for session in finished]
    inputs = [
        reward_input(group.prompt, text=each.text, ids=each.ids, finish_reason=each.finish_reason) for each in responses
    ]
    scores = await context.scorer.score(inputs) if inputs else []
    unscored = [[replace(row, reward=None, reward_components={}) for row in one.trajectories] for one in finished]
    scored = map(with_reward, unscored, scores)
    sessions = [next(scored) if session.failure is None else session for session in group.sessions]
    checked = check_sessions(sessions, loop=loop, prompt=group.prompt, num_sessions=len(sessions))
    return replace(group, sessions=checked)
