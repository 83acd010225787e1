"""Runs an agent loop over many prompts at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import structlog

from rl_core.errors import RolloutError, SettingsError
from rl_core.records import Group, IntArray, Prompt, Trajectory
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams
from rl_rollout.loops.protocol import AgentLoop, LoopContext, SessionResult, describe_error, stable_seed
from rl_rollout.rewards.scorer import RewardScorer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What became of all sessions of one prompt.

    Attributes:
        prompt: The prompt.
        sessions: One result a session, in order.
        error: What the loop raised, when the whole group failed at once.
    """

    prompt: Prompt
    sessions: tuple[SessionResult, ...]
    error: Exception | None = None

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Trajectories of the sessions that did not fail."""
        return tuple(t for session in self.sessions if session.failure is None for t in session.trajectories)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why sessions failed, one for each that did."""
        return tuple(session.failure for session in self.sessions if session.failure is not None)

    @property
    def group(self) -> Group:
        """The prompt with the trajectories that can train."""
        return Group(prompt=self.prompt, trajectories=self.trajectories)


OnGroup = Callable[[GroupResult], Awaitable[None] | None]
"""Called with each group as its last session settles, in the order of settling."""


class Rollout:
    """Prompts in, settled groups out; one group's failure never touches another."""

    def __init__(
        self,
        engine: RolloutEngine,
        loop: AgentLoop,
        *,
        scorer: RewardScorer,
        decode: Callable[[Sequence[IntArray]], list[str]],
        max_concurrent_groups: int | None = None,
    ) -> None:
        """Join the parts; nothing runs yet.

        Args:
            engine: Started by the caller, and closed by it.
            loop: What a session does.
            scorer: Gives rewards.
            decode: Text of token sequences, such as `PromptTokenizer.decode`.
            max_concurrent_groups: Groups under way at once; None starts all.
        """
        if max_concurrent_groups is not None and max_concurrent_groups < 1:
            raise SettingsError(f"max_concurrent_groups must be at least 1; found {max_concurrent_groups}.")
        self._engine = engine
        self._loop = loop
        self._scorer = scorer
        self._decode = decode
        self._slots = None if max_concurrent_groups is None else asyncio.Semaphore(max_concurrent_groups)

    async def run(
        self,
        prompts: Sequence[Prompt],
        *,
        num_sessions: int,
        sampling: SamplingParams,
        seed: int | None = None,
        on_group: OnGroup | None = None,
    ) -> list[GroupResult]:
        """Run num_sessions sessions of each prompt.

        When this call is cancelled, or `on_group` raises, every request of the engine is aborted.

        Args:
            prompts: With distinct uids.
            num_sessions: Sessions of each prompt.
            sampling: How to draw; its own seed is replaced.
            seed: Of the run. A prompt's draws depend on it and the prompt's uid alone, not on order or
                company. None draws without seeds; greedy sampling needs none.
            on_group: Called with each result as it settles; awaited when it returns an awaitable.

        Returns:
            One result a prompt, in the order of `prompts`.
        """
        if num_sessions < 1:
            raise SettingsError(f"num_sessions must be at least 1; found {num_sessions}.")
        on_group_error: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [
                    tasks.create_task(self._run_prompt(prompt, num_sessions, _seeded(sampling, seed, prompt), on_group))
                    for prompt in prompts
                ]
        except BaseExceptionGroup as errors:
            on_group_error = errors.exceptions[0]
        except asyncio.CancelledError:
            await self._engine.abort_all()
            raise
        if on_group_error is not None:  # raised here, so that it keeps the cause that it came with
            await self._engine.abort_all()
            raise on_group_error
        return [group.result() for group in groups]

    async def _run_prompt(
        self, prompt: Prompt, num_sessions: int, sampling: SamplingParams, on_group: OnGroup | None
    ) -> GroupResult:
        context = LoopContext(engine=self._engine, sampling=sampling, scorer=self._scorer, decode=self._decode)
        async with self._slots or nullcontext():
            result = await self._run_loop(prompt, num_sessions, context)
        if result.failures:
            log.info("sessions_failed", prompt=prompt.uid, num_failed=len(result.failures), first=result.failures[0])
        if on_group is not None:
            settled = on_group(result)
            if settled is not None:
                await settled
        return result

    async def _run_loop(self, prompt: Prompt, num_sessions: int, context: LoopContext) -> GroupResult:
        try:
            sessions = await self._loop.run_group(prompt, num_sessions=num_sessions, context=context)
        except Exception as error:
            failed = SessionResult(failure=describe_error(error))
            return GroupResult(prompt=prompt, sessions=(failed,) * num_sessions, error=error)
        if len(sessions) != num_sessions:
            failed = SessionResult(failure=f"the agent loop gave {len(sessions)} results for {num_sessions} sessions")
            return GroupResult(prompt=prompt, sessions=(failed,) * num_sessions)
        return GroupResult(prompt=prompt, sessions=tuple(sessions))


def _seeded(sampling: SamplingParams, seed: int | None, prompt: Prompt) -> SamplingParams:
    if seed is None or sampling.temperature == 0:
        return replace(sampling, seed=None)
    return replace(sampling, seed=stable_seed(seed, prompt.uid))


def require_some_success(results: Sequence[GroupResult]) -> None:
    """Refuse to go on when not one session succeeded: that is a fault of the run, not of a session.

    Raises:
        RolloutError: Every session failed; the message has the first reason, its cause what was raised.
    """
    failures = [failure for result in results for failure in result.failures]
    if failures and len(failures) == sum(len(result.sessions) for result in results):
        raise RolloutError(f"all {len(failures)} sessions failed; the first: {failures[0]}") from next(
            (result.error for result in results if result.error is not None), None
        )
