"""Agents other than local programs: functions in this process, and remote workers."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rl_core.errors import DataError, RolloutError, SettingsError
from rl_core.registry import Registry
from rl_rollout.gateway import Gateway
from rl_rollout.loops.agent_options import AgentOptions
from rl_rollout.loops.agent_task import AgentOutcome, AgentTask
from rl_rollout.rewards.outputs import read_output
from rl_rollout.rewards.protocol import AgentRun, RewardResult
from rl_rollout.rewards.scorer import function_name
from rl_rollout.user_errors import describe_raised, is_meant_for_us
from rl_rollout.user_files import find_in

AGENTS: Registry[Any] = Registry("agent", {}, group="rl_rollout.agents")


class AgentFunction:
    """Runs an `async def` with one `AgentTask`. It may return the session's reward."""

    def __init__(self, options: AgentOptions) -> None:
        """Find the function.

        Raises:
            SettingsError: It does not exist, or is not an `async def`.
        """
        self._function: Callable[[AgentTask], Any] = find_in(AGENTS, str(options.function))
        self._time_limit_s = options.time_limit_s
        if not inspect.iscoroutinefunction(self._function):
            raise SettingsError(f"agent {options.function!r} must be an `async def`; found {self._function!r}.")

    async def check(self) -> str:
        """Return a line for a plan."""
        return f"agent: {function_name(self._function)}"

    @asynccontextmanager
    async def running(self, task: AgentTask) -> AsyncIterator[AgentOutcome]:
        """Run the function and yield its outcome.

        Raises:
            RolloutError: It raised.
            DataError: Its result is not a reward.
        """
        call = asyncio.create_task(self._call(task))
        try:
            done, _ = await asyncio.wait({call}, timeout=self._time_limit_s)
        finally:
            call.cancel()  # not awaited: a function can refuse cancellation
        yield call.result() if done else AgentOutcome(run=AgentRun(ended="wall_time"))

    async def _call(self, task: AgentTask) -> AgentOutcome:
        name = function_name(self._function)
        try:
            given = await self._function(task)
        except BaseException as error:
            if is_meant_for_us(error):
                raise
            raise RolloutError(describe_raised(f"agent {name!r}", error)) from error
        try:
            return AgentOutcome(reward=None if given is None else read_output(given))
        except DataError as error:
            raise DataError(f"agent {name!r} returned {error}") from error


class RemoteAgents:
    """Offers sessions to remote workers, which claim and finish them at the gateway."""

    def __init__(self, options: AgentOptions, gateway: Callable[[], Gateway | None]) -> None:
        """Store the options, and a way to find the gateway once it serves."""
        self._options, self._gateway = options, gateway

    async def check(self) -> str:
        """Return a line for a plan."""
        gateway = self._options.gateway
        return f"agent: workers that claim sessions at {gateway.host}:{gateway.port}/sessions/claim"

    @asynccontextmanager
    async def running(self, task: AgentTask) -> AsyncIterator[AgentOutcome]:
        """Offer a session to remote workers, and yield its outcome.

        Raises:
            RolloutError: No worker claimed it or finished it in time.
        """
        gateway = self._gateway()
        if gateway is None:
            raise RolloutError("the agent loop was closed.")
        session, shown = gateway.sessions.by_key(task.api_key), task.shown(self._options.columns)
        await gateway.offers.finished(session, shown, deadline_s=self._options.time_limit_s)
        if session.reward is None:
            yield AgentOutcome()
        else:
            yield AgentOutcome(reward=RewardResult(reward=session.reward, components=session.reward_components))
