"""New rewards for earlier sessions, such as those of a skip cache."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from rl_core.data import Prompt
from rl_core.errors import SettingsError
from rl_rollout.loops.outcomes import check_sessions
from rl_rollout.loops.protocol import AgentLoop, Judged, LoopContext, SessionResult, loop_name
from rl_rollout.loops.single_turn import with_reward

Judge = Callable[[SessionResult, LoopContext], Judged]


def can_score_again(loop: AgentLoop | type[AgentLoop]) -> bool:
    """Return True if a loop, or a class of loops, can recover the text that its reward judges from a stored session."""
    return callable(getattr(loop, "judged", None))


async def score_again(
    groups: Sequence[tuple[Prompt, Sequence[SessionResult]]], *, loop: AgentLoop, context: LoopContext
) -> list[tuple[SessionResult, ...]]:
    """Return the prompts' sessions with rewards from the context's current scorer.

    Failed sessions stay unchanged. Reward components stay if the new reward has none of the same name.

    Raises:
        SettingsError: The loop cannot recover the text that its reward judges from a session.
    """
    judged: Judge | None = getattr(loop, "judged", None)
    if judged is None:
        raise SettingsError(
            f"{loop_name(loop)} cannot recover the text that its reward judges from a stored session: it has no "
            "`judged` method. Keep the stored rewards, or generate the sessions again."
        )
    return list(await asyncio.gather(*(_score(*group, judged, loop, context) for group in groups)))


async def _score(
    prompt: Prompt, sessions: Sequence[SessionResult], judged: Judge, loop: AgentLoop, context: LoopContext
) -> tuple[SessionResult, ...]:
    finished = [session for session in sessions if session.failure is None]
    responses = [judged(session, context) for session in finished]
    inputs = [each.as_input(prompt) for each in responses]
    scores = await context.scorer.score(inputs) if inputs else []
    unscored = [[replace(row, reward=None, reward_components={}) for row in one.trajectories] for one in finished]
    scored = map(with_reward, unscored, scores)
    again = [next(scored) if session.failure is None else session for session in sessions]
    return check_sessions(again, loop=loop, prompt=prompt, num_sessions=len(again))
