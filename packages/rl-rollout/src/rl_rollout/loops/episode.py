"""One episode of an environment: calls it with deadlines, and checks its results."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np
import structlog

from rl_core.data import Prompt, encodable
from rl_core.errors import DataError, RolloutError
from rl_rollout.rewards.outputs import preview, preview_error, read_output
from rl_rollout.rewards.protocol import RewardOutput, RewardResult
from rl_rollout.tools.blocking import BlockingCalls
from rl_rollout.tools.results import shortened
from rl_rollout.user_errors import describe_raised, ends_the_run, is_meant_for_us

log = structlog.get_logger(__name__)

HURRIED_S = 1.0
"""Maximum seconds for an environment to close when the run is ending."""
LEFT_BEHIND: set[asyncio.Task[Any]] = set()
"""Calls that took too long and still run. References keep them from being collected."""


class Environment(Protocol):
    """One episode; each session creates a new object. Methods may be `def`, which may block, or `async def`.

    An environment may also have `close()`, which is called when its session ends, however it ends.
    """

    def reset(self, prompt: Prompt) -> str | None:
        """Return the text after the prompt; None adds nothing."""
        ...

    def step(self, text: str) -> tuple[str, RewardOutput | None, bool]:
        """Return the text after the model's turn, the turn's reward if it has one, and whether the episode is done.

        A reward is a number, or a mapping with "reward" and named components, as for reward functions.
        """
        ...


class Episode:
    """An environment, its rewards and its times.

    Attributes:
        earned: Sums of the steps' rewards and of their components by name; None if no step returned any.
        reward_s: Seconds of the steps with a reward.
        other_s: Seconds of `reset` and of the other steps.
    """

    def __init__(
        self, make: Callable[[], Any], blocking: BlockingCalls, *, timeout_s: float, max_observation_chars: int
    ) -> None:
        """Create without an environment.

        Args:
            make: Creates the environment.
            blocking: Runs methods that are not `async def`.
            timeout_s: Maximum seconds of one call.
            max_observation_chars: Maximum characters of an observation; longer ones are truncated.
        """
        self.earned: RewardResult | None = None
        self.reward_s = 0.0
        self.other_s = 0.0
        self._make = make
        self._blocking = blocking
        self._timeout_s = timeout_s
        self._max_observation_chars = max_observation_chars
        self._environment: Any = None

    async def reset(self, prompt: Prompt) -> str | None:
        """Create and reset the environment.

        Raises:
            RolloutError: It raised, timed out, or did not return a string or None. The message has the details.
        """
        started_at = time.perf_counter()
        self._environment = await self._guarded("__init__", self._in_thread(self._make))
        observation = await self._call("reset", prompt)
        self.other_s += time.perf_counter() - started_at
        if observation is not None and not isinstance(observation, str):
            raise RolloutError(f"the environment's reset returned {_seen(observation)}; expected a string or None.")
        return None if observation is None else self._readable(observation)

    async def step(self, text: str) -> tuple[str, bool]:
        """Return the observation, and whether the episode is over.

        Raises:
            RolloutError: It raised, timed out, or did not return observation, reward and is_done.
        """
        started_at = time.perf_counter()
        outcome = await self._call("step", text)
        elapsed_s = time.perf_counter() - started_at
        if not isinstance(outcome, tuple | list) or len(outcome) != 3:
            raise RolloutError(
                f"the environment's step returned {_seen(outcome)}; expected (observation, reward or None, is_done)."
            )
        observation, reward, is_done = outcome
        if not isinstance(observation, str):
            raise RolloutError(
                f"the environment's step returned observation = {_seen(observation)}; expected a string."
            )
        if not isinstance(is_done, bool | np.bool_):
            raise RolloutError(f"the environment's step returned is_done = {_seen(is_done)}; expected True or False.")
        if reward is None:
            self.other_s += elapsed_s
        else:
            self.reward_s += elapsed_s
            self._earn(reward)
        return self._readable(observation), bool(is_done)

    def hurry(self) -> None:
        """Limit closing to a second, because the run is ending."""
        self._timeout_s = min(self._timeout_s, HURRIED_S)

    async def close(self) -> None:
        """Close the environment. A failure to close does not affect its session."""
        if not callable(getattr(self._environment, "close", None)):
            return
        try:
            await self._call("close")
        except RolloutError as error:
            log.warning("environment_not_closed", reason=str(error))

    def _earn(self, reward: Any) -> None:
        earned = self.earned or RewardResult(reward=0.0)
        whose = "the environment's step returned"
        try:
            given = read_output(reward)
            whose = "the rewards of the environment's steps add up to"
            names = {**earned.components, **given.components}
            self.earned = read_output(
                RewardResult(
                    reward=earned.reward + given.reward,
                    components={n: earned.components.get(n, 0.0) + given.components.get(n, 0.0) for n in names},
                    extras={**earned.extras, **given.extras},
                )
            )
        except DataError as error:
            raise RolloutError(f"{whose} {error}") from error
        except Exception as error:  # user-defined mappings or numbers can raise anything when read
            raise RolloutError(f"{whose} a reward that cannot be read ({preview_error(error)})") from error

    def _readable(self, observation: str) -> str:
        """Return an observation as the model reads it."""
        return encodable(shortened(observation, max_chars=self._max_observation_chars))

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._guarded(name, self._run(name, *arguments))

    async def _run(self, name: str, *arguments: Any) -> Any:
        method = getattr(self._environment, name)
        if not inspect.iscoroutinefunction(method):
            return await self._in_thread(lambda: method(*arguments))
        task = asyncio.create_task(_caught(method(*arguments)))
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            if not task.done():  # a call that refuses cancellation keeps running
                task.cancel()
                LEFT_BEHIND.add(task)
                task.add_done_callback(LEFT_BEHIND.discard)
        if not task.done():
            raise _TookTooLongError
        value, error = task.result()
        if error is not None:
            raise error
        return value

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        has_ended = False

        def call() -> Any:
            nonlocal has_ended
            try:
                return function()
            finally:
                has_ended = True

        try:
            return await self._blocking.run(call, timeout_s=self._timeout_s)
        except TimeoutError as error:
            if has_ended:  # the environment's own error
                raise
            raise _TookTooLongError from error

    async def _guarded(self, name: str, call: Awaitable[Any]) -> Any:
        """Return a call's result.

        Raises:
            RolloutError: It raised, or took too long.
        """
        try:
            return await call
        except _TookTooLongError as error:
            raise RolloutError(f"the environment's {name} took longer than {self._timeout_s:g} s") from error
        except BaseException as error:
            if ends_the_run(error):
                raise
            raise RolloutError(describe_raised(f"the environment's {name}", error)) from error


async def _caught(call: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return a call's result or its exception.

    A SystemExit, for example, would end the event loop as a task's error.
    """
    try:
        return await call, None
    except BaseException as error:
        if is_meant_for_us(error):
            raise
        return None, error


class _TookTooLongError(Exception):
    """A call did not end in time. Distinct from an environment's own TimeoutError."""


def _seen(value: Any) -> str:
    return f"{preview(value)} ({type(value).__name__})"
