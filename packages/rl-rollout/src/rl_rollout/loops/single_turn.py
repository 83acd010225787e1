"""A loop that samples one response per session."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl_core.data import Prompt, Timings, Trajectory
from rl_core.errors import EngineError
from rl_rollout.engines.protocol import GenerateRequest, Generation
from rl_rollout.loops.outcomes import join_parts
from rl_rollout.loops.protocol import LoopContext, SessionResult
from rl_rollout.rewards.protocol import RewardInput
from rl_rollout.rewards.scorer import Scored, reward_input


class SingleTurnLoop:
    """Sends one request for all sessions of a prompt, and scores the responses.

    A session's generate_s is the time of that one request, so it is equal for the whole group.
    """

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        """Return one trajectory per session, in order.

        Raises:
            EngineError: The engine cannot serve the request, or returned another number of responses.
        """
        request = GenerateRequest(
            input_ids=prompt.input_ids, sampling=context.sampling, num_samples=num_sessions, images=prompt.images
        )
        started_at = time.perf_counter()
        generations = await context.engine.generate(request)
        generate_s = time.perf_counter() - started_at
        if len(generations) != num_sessions:
            raise EngineError(f"the engine returned {len(generations)} responses to a request for {num_sessions}.")
        trajectories = [
            trajectory_of(prompt, generation, session_index=index, generate_s=generate_s)
            for index, generation in enumerate(generations)
        ]
        finished = [index for index, generation in enumerate(generations) if _failure_of(generation) is None]
        begins_thinking = context.begins_thinking(prompt.input_ids)
        texts = context.decode([generations[index].token_ids for index in finished])
        inputs = [
            reward_input(
                prompt,
                text=text,
                ids=generations[i].token_ids,
                finish_reason=generations[i].finish_reason,
                begins_thinking=begins_thinking,
            )
            for i, text in zip(finished, texts, strict=True)
        ]
        scored = dict(zip(finished, await context.scorer.score(inputs) if inputs else (), strict=True))
        return [
            with_reward([trajectories[index]], scored[index])
            if index in scored
            else SessionResult(trajectories=(trajectories[index],), failure=_failure_of(generation))
            for index, generation in enumerate(generations)
        ]

    def judged(self, prompt: Prompt, session: SessionResult, context: LoopContext) -> RewardInput:
        """Return a session's response as its reward judges it."""
        (trajectory,) = session.trajectories
        ids = trajectory.input_ids[trajectory.num_prompt_tokens :]
        (text,) = context.decode([ids])
        begins_thinking = context.begins_thinking(trajectory.input_ids[: trajectory.num_prompt_tokens])
        return reward_input(
            prompt, text=text, ids=ids, finish_reason=trajectory.finish_reason, begins_thinking=begins_thinking
        )


def trajectory_of(prompt: Prompt, generation: Generation, *, session_index: int, generate_s: float) -> Trajectory:
    """Build one trajectory from prompt and response, with the response's tokens exactly as sampled."""
    return Trajectory(
        prompt_uid=prompt.uid,
        session_index=session_index,
        **join_parts([(prompt.input_ids, None), (generation.token_ids, generation)]),
        finish_reason=generation.finish_reason,
        routed_experts=generation.routed_experts,
        timings=Timings(generate_s=generate_s, preemptions=generation.num_preempted),
        images=prompt.images,
    )


def with_reward(trajectories: Sequence[Trajectory], scored: Scored) -> SessionResult:
    """Set the reward on a session's trajectories, and the timings on the last one."""
    last = len(trajectories) - 1
    result = scored.result
    reward: dict[str, Any] = {} if result is None else {"reward": result.reward, "reward_components": result.components}
    settled = []
    for index, trajectory in enumerate(trajectories):
        changes = dict(reward)
        if index == last:
            changes["timings"] = replace(trajectory.timings, reward_s=scored.reward_s, reward_wait_s=scored.wait_s)
        if result is not None and result.extras:
            changes["extras"] = {**trajectory.extras, **result.extras}
        settled.append(replace(trajectory, **changes))
    return SessionResult(trajectories=tuple(settled), failure=scored.failure)


def _failure_of(generation: Generation) -> str | None:
    if generation.finish_reason == "abort":
        return f"the engine aborted the response after {len(generation.token_ids)} tokens"
    if not len(generation.token_ids):
        return "the engine returned a response without tokens"
    return None
