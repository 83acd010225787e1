"""Joins a session's tokens to trajectories, and checks what loops return. An invalid session fails only itself."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rl_core.data import NO_VERSION, ExpertArray, IntArray, Prompt, Trajectory, encodable
from rl_core.errors import DataError
from rl_rollout.engines.protocol import Generation
from rl_rollout.loops.protocol import SessionResult, loop_name
from rl_rollout.rewards.outputs import preview_error, read_extras, read_output, typed_preview
from rl_rollout.rewards.protocol import RewardResult


def check_sessions(given: Any, *, loop: object, prompt: Prompt, num_sessions: int) -> tuple[SessionResult, ...]:
    """Return one result per session, whatever a loop returned.

    Args:
        given: The result of `run_group`.
        loop: The loop, for messages.
        prompt: The sessions' prompt.
        num_sessions: Expected number of sessions. If the number of results differs, all sessions fail.
    """
    name = loop_name(loop)
    if not isinstance(given, list | tuple):
        failure = (
            f"{name} returned {typed_preview(given)}; expected a list of {num_sessions} SessionResult, one per session"
        )
    elif len(given) != num_sessions:
        failure = f"{name} returned {len(given)} results for {num_sessions} sessions"
    else:
        return tuple(_checked(session, name=name, prompt=prompt, index=index) for index, session in enumerate(given))
    return (SessionResult(failure=failure),) * num_sessions


def join_parts(parts: Sequence[tuple[IntArray, Generation | None]]) -> dict[str, Any]:
    """Return the tokens of a trajectory with their columns, by the names of `Trajectory`'s fields.

    Args:
        parts: Token ids, in order; each with the engine's output that sampled them if they train, else with None.

    Returns:
        [T] input_ids, loss_mask, rollout_logprobs and policy_versions; [T, K] nucleus_ids, None if no part has them.
    """
    ids = np.concatenate([part for part, _ in parts]).astype(np.int32, copy=False)
    mask = np.zeros(len(ids), dtype=np.bool_)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    versions = np.full(len(ids), NO_VERSION, dtype=np.int32)
    start, nucleus_ids = 0, None
    for part, generation in parts:
        stop = start + len(part)
        if generation is not None:
            mask[start:stop] = True
            logprobs[start:stop] = generation.logprobs
            versions[start:stop] = generation.policy_versions
            if generation.nucleus_ids is not None:
                if nucleus_ids is None:
                    nucleus_ids = np.full((len(ids), generation.nucleus_ids.shape[1]), -1, np.int32)
                nucleus_ids[start:stop] = generation.nucleus_ids
        start = stop
    columns = {"input_ids": ids, "loss_mask": mask, "rollout_logprobs": logprobs, "policy_versions": versions}
    return {**columns, "nucleus_ids": nucleus_ids}


def join_experts(told: Iterable[ExpertArray | None], num_tokens: int) -> ExpertArray | None:
    """Join the experts of a trajectory's tokens. Each token's come from the first request that reported them.

    Args:
        told: Experts from the trajectory's requests, in order, each for a prefix of its tokens.
        num_tokens: T.

    Returns:
        [T, layers, top_k], -1 where unknown; None if no request reported experts.
    """
    joined: ExpertArray | None = None
    for experts in told:
        if experts is None:
            continue
        if joined is None:
            joined = np.full((num_tokens, *experts.shape[1:]), -1, np.int16)
        first = joined[: len(experts)]
        is_open = (first < 0).all(axis=(1, 2))
        first[is_open] = experts[is_open]
    return joined


def with_baseline_of(greedy: SessionResult, sessions: Sequence[SessionResult]) -> tuple[SessionResult, ...]:
    """Return sessions with a greedy one's reward as baseline; if it failed, all fail, because they have none."""
    failure, changes = None, dict[str, Any](reward=None)
    if greedy.failure is None:
        changes = {"reward_baseline": greedy.trajectories[-1].reward}
    else:
        failure = f"the greedy session, whose reward is the baseline, failed: {greedy.failure}"
    return tuple(
        SessionResult(
            trajectories=tuple(replace(row, **changes) for row in one.trajectories), failure=one.failure or failure
        )
        for one in sessions
    )


def _checked(given: Any, *, name: str, prompt: Prompt, index: int) -> SessionResult:
    try:
        return _read(given, prompt=prompt, index=index)
    except DataError as error:
        failure = f"{name} returned {error}"
    except Exception as error:  # user-defined numbers or mappings can raise anything when read
        failure = f"{name} returned a session that cannot be read ({preview_error(error)})"
    kept = (
        tuple(replace(trajectory, reward=None) for trajectory in given.trajectories)
        if isinstance(given, SessionResult)
        else ()
    )
    return SessionResult(trajectories=kept, failure=failure)


def _read(given: Any, *, prompt: Prompt, index: int) -> SessionResult:
    """Read a session, with its rewards as floats.

    Raises:
        DataError: The session is invalid. The message continues a sentence that ends in "returned".
    """
    if not isinstance(given, SessionResult):
        raise DataError(f"{typed_preview(given)} for session {index}; expected a SessionResult.")
    if given.failure is not None:
        if not given.failure:
            raise DataError(
                f"failure = {typed_preview(given.failure)} for session {index}; expected a reason, or None."
            )
        return replace(given, failure=encodable(given.failure))
    if not given.trajectories:
        raise DataError(f"no trajectory and no failure for session {index}; expected one of them.")
    trajectories = []
    for output_index, trajectory in enumerate(given.trajectories):
        name = (trajectory.prompt_uid, trajectory.session_index, trajectory.output_index)
        expected = (prompt.uid, index, output_index)
        if name != expected:
            raise DataError(f"a trajectory named {name} (prompt, session, output); expected {expected}.")
        try:
            trajectories.append(_read_trajectory(trajectory))
        except DataError as error:
            raise DataError(f"trajectory {output_index} of session {index} with {error}") from error
    return replace(given, trajectories=tuple(trajectories))


def _read_trajectory(trajectory: Trajectory) -> Trajectory:
    if trajectory.reward is None:
        raise DataError("reward = None; expected a finite number, or a session with a failure.")
    read = read_output(RewardResult(reward=trajectory.reward, components=trajectory.reward_components))
    if trajectory.extras:
        trajectory = replace(trajectory, extras=read_extras(trajectory.extras))
    if type(trajectory.reward) is float and not trajectory.reward_components:
        return trajectory
    return replace(trajectory, reward=read.reward, reward_components=read.components)
