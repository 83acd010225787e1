"""One environment under way: called in its own manner, with deadlines, and what it gives is checked."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from rl_core.errors import DataError
from rl_core.records import Prompt
from rl_rollout.loops.protocol import describe_error
from rl_rollout.rewards.outputs import read_output
from rl_rollout.tools.blocking import BlockingCalls

log = structlog.get_logger(__name__)


class Environment(Protocol):
    """One episode: a new object is made for each session. Methods may be `def`, which may block, or `async def`.

    An environment may also have `close()`, which is called when its session ends, however it ends.
    """

    def reset(self, prompt: Prompt) -> str | None:
        """What the model reads after the prompt; None adds nothing."""
        ...

    def step(self, text: str) -> tuple[str, float | None, bool]:
        """What the model reads after its turn, the reward of the turn if it has one, and whether this was the last."""
        ...


class Episode:
    """An environment and what it cost.

    Attributes:
        reward: Sum of the rewards of the steps; None when no step gave any.
        reward_s: Seconds of the steps that gave a reward.
        other_s: Seconds of `reset` and of the other steps.
    """

    def __init__(self, make: Callable[[], Any], blocking: BlockingCalls, *, timeout_s: float) -> None:
        """Make nothing yet.

        Args:
            make: Makes the environment.
            blocking: Runs what is not `async def`.
            timeout_s: Longest time of one call.
        """
        self.reward: float | None = None
        self.reward_s = 0.0
        self.other_s = 0.0
        self._make = make
        self._blocking = blocking
        self._timeout_s = timeout_s
        self._environment: Any = None

    async def reset(self, prompt: Prompt) -> str | None:
        """Make the environment, and begin.

        Raises:
            DataError: It gave something else than a text or None.
        """
        started_at = time.perf_counter()
        self._environment = await self._blocking.run(self._make, timeout_s=self._timeout_s)
        observation = await self._call("reset", prompt)
        self.other_s += time.perf_counter() - started_at
        if observation is not None and not isinstance(observation, str):
            raise DataError(f"reset must give a text or None; found {type(observation).__name__}.")
        return observation

    async def step(self, text: str) -> tuple[str, bool]:
        """What was observed, and whether the episode is over.

        Raises:
            DataError: It gave something else than observation, reward and is_done.
        """
        started_at = time.perf_counter()
        outcome = await self._call("step", text)
        elapsed_s = time.perf_counter() - started_at
        if not isinstance(outcome, tuple | list) or len(outcome) != 3 or not isinstance(outcome[0], str):
            raise DataError(f"step must give (observation, reward or None, is done); found {str(outcome)[:120]!r}.")
        observation, reward, is_done = outcome
        if reward is None:
            self.other_s += elapsed_s
        else:
            self.reward_s += elapsed_s
            self.reward = (self.reward or 0.0) + read_output(reward).reward
        return observation, bool(is_done)

    async def close(self) -> None:
        """Close the environment; a failure to close it changes nothing of its session."""
        if not callable(getattr(self._environment, "close", None)):
            return
        try:
            await self._call("close")
        except Exception as error:
            log.warning("environment_not_closed", reason=describe_error(error))

    async def _call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self._environment, name)
        try:
            if not inspect.iscoroutinefunction(method):
                return await self._blocking.run(lambda: method(*arguments), timeout_s=self._timeout_s)
            async with asyncio.timeout(self._timeout_s):
                return await method(*arguments)
        except TimeoutError as error:
            raise TimeoutError(f"the environment's {name} took longer than {self._timeout_s:g} s") from error
