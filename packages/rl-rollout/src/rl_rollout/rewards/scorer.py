"""Runs a reward function on the responses of a group, with deadlines, and checks what it gives."""

import asyncio
import contextlib
import inspect
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.errors import DataError, SettingsError
from rl_core.records import Prompt
from rl_rollout.rewards.protocol import RewardFunction, RewardInput, RewardResult
from rl_rollout.rewards.threaded import CallThreads

FLOAT32_MAX = 3.4e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What became of one reward call; exactly one of result and failure is set.

    Attributes:
        result: The reward.
        failure: Why there is none.
        reward_s: Seconds that the call took.
    """

    result: RewardResult | None = None
    failure: str | None = None
    reward_s: float = 0.0


class RewardScorer:
    """Scores responses; a call that raises, hangs or gives no number is a failure, never a zero.

    A quick function (see `quick`) is called in place. Another `def` runs in a thread for each group,
    its responses one after another, so that it can be left behind when it hangs. An `async def` runs
    for all responses at once.
    """

    def __init__(self, function: RewardFunction, *, timeout_s: float = 30.0, max_concurrency: int = 32) -> None:
        """Choose how to call the function.

        Args:
            function: The reward function.
            timeout_s: Longest time of one call; quick functions have no limit.
            max_concurrency: Threads, or async calls, at once.

        Raises:
            SettingsError: timeout_s or max_concurrency is not positive.
        """
        if timeout_s <= 0 or max_concurrency < 1:
            raise SettingsError(
                f"a reward needs timeout_s > 0 and max_concurrency >= 1; found {timeout_s} and {max_concurrency}."
            )
        self.name = function_name(function)
        self._function: Any = function
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_concurrency)
        self._threads: CallThreads[RewardInput, Scored] = CallThreads(self._call)
        self._is_quick = bool(getattr(function, "is_quick", False))
        self._is_async = is_async(function)

    async def score(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        """Score the responses of one group, in order; never raises for a single response."""
        if self._is_async:
            return list(await asyncio.gather(*map(self._call_async, inputs)))
        if self._is_quick:
            return [self._call(given) for given in inputs]
        async with self._slots:
            return await self._score_in_threads(inputs)

    async def rehearse(self, prompt: Prompt) -> None:
        """Score an empty response to a prompt, to find a broken function before anything heavy starts.

        Raises:
            SettingsError: The function fails on it.
        """
        (scored,) = await self.score([reward_input(prompt, text="", ids=np.empty(0, dtype=np.int32))])
        if scored.failure is not None:
            raise SettingsError(f"the reward fails on an empty response to the first prompt: {scored.failure}")

    def close(self) -> None:
        """End the threads, and close the function if it can be closed."""
        self._threads.close()
        close = getattr(self._function, "close", None)
        if callable(close):
            close()

    async def _call_async(self, given: RewardInput) -> Scored:
        async with self._slots:
            started_at = time.perf_counter()
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    value = await self._function(given)
            except Exception as error:
                if isinstance(error, TimeoutError) and deadline.expired():
                    return self._timed_out(given)
                return self._raised(given, error, started_at=started_at)
            return self._checked(given, value, started_at=started_at)

    async def _score_in_threads(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        scored: list[Scored] = []
        while len(scored) < len(inputs):
            scored += await self._threads.run(inputs[len(scored) :], timeout_s=self._timeout_s)
            if len(scored) < len(inputs):
                scored.append(self._timed_out(inputs[len(scored)]))
        return scored

    def _call(self, given: RewardInput) -> Scored:
        started_at = time.perf_counter()
        try:
            value = self._function(given)
        except (Exception, SystemExit) as error:
            return self._raised(given, error, started_at=started_at)
        return self._checked(given, value, started_at=started_at)

    def _checked(self, given: RewardInput, value: Any, *, started_at: float) -> Scored:
        reward_s = time.perf_counter() - started_at
        try:
            return Scored(result=read_output(value), reward_s=reward_s)
        except DataError as error:
            return Scored(failure=f"{self._about(given)} gave {error}", reward_s=reward_s)

    def _raised(self, given: RewardInput, error: BaseException, *, started_at: float) -> Scored:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        failure = (
            f"{self._about(given)} raised {type(error).__name__}: {error} "
            f"({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
        )
        return Scored(failure=failure, reward_s=time.perf_counter() - started_at)

    def _timed_out(self, given: RewardInput) -> Scored:
        failure = f"{self._about(given)} gave nothing for {self._timeout_s} s, and was left behind"
        return Scored(failure=failure, reward_s=self._timeout_s)

    def _about(self, given: RewardInput) -> str:
        return f"reward function {self.name!r} on prompt {given.prompt_uid}"


def reward_input(prompt: Prompt, *, text: str, ids: Any, finish_reason: Any = "stop") -> RewardInput:
    """What a reward function gets for a response to a prompt."""
    return RewardInput(
        prompt_uid=prompt.uid,
        response_text=text,
        response_ids=ids,
        messages=prompt.messages,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        columns=prompt.columns,
        finish_reason=finish_reason,
    )


def read_output(value: Any) -> RewardResult:
    """A reward function's value as a RewardResult.

    Raises:
        DataError: It is not a finite number, a mapping with "reward", or a RewardResult of finite numbers.
    """
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise DataError(f"a mapping without 'reward'; it has {sorted(map(str, value))}.")
        components = {name: part for name, part in value.items() if name != "reward"}
        value = RewardResult(reward=value["reward"], components=components)
    elif not isinstance(value, RewardResult):
        return RewardResult(reward=_finite(value, name="reward"))
    components = {str(name): _finite(part, name=str(name)) for name, part in value.components.items()}
    return RewardResult(reward=_finite(value.reward, name="reward"), components=components, extras=value.extras)


def is_async(function: Any) -> bool:
    """True for an `async def`, and for an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def function_name(function: Any) -> str:
    """Name of a function for messages: `file.py:name` when it is the user's, else module and name."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", "")
    if code is not None and module.startswith("rl_reward_"):
        return f"{Path(code.co_filename).name}:{name}"
    return name if module.startswith("rl_rollout.") else f"{module}.{name}"


def _finite(value: Any, *, name: str) -> float:
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        with contextlib.suppress(OverflowError):
            number = float(value)
            if abs(number) <= FLOAT32_MAX:  # False for NaN too
                return number
    shown = repr(value)
    raise DataError(
        f"{name} = {shown if len(shown) <= 80 else shown[:77] + '...'} ({type(value).__name__}); "
        "expected a finite number."
    )
