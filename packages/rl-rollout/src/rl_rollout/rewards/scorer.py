"""Runs a reward function on a group's responses, with deadlines, and checks its results."""

import asyncio
import functools
import inspect
import time
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt

from rl_core.data import Prompt
from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_core.record_fields import PositiveFloat, PositiveInt, converts_arguments
from rl_rollout.rewards.calls import CLOCK, CallClock, CallThreads
from rl_rollout.rewards.options import FailurePolicy
from rl_rollout.rewards.outputs import preview_error, read_output
from rl_rollout.rewards.protocol import RewardFunction, RewardInput, RewardResult
from rl_rollout.rewards.registry import check_callable
from rl_rollout.user_code import describe_raised, is_meant_for_us

NO_LIMIT_S = 1e9
FAILED_COMPONENT = "reward_failed"
FAILURE_EXTRA = "reward_failure"
NOT_WORTH_A_RETRY = (DataError, SettingsError, MissingExtraError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The outcome of one reward call. Exactly one of result and failure is set.

    Attributes:
        result: The reward.
        failure: Why there is no reward.
        reward_s: Seconds of its calls, including all attempts and the pauses between them, without waits for a free
            slot or a rate limit.
        wait_s: Seconds of waiting for a free slot, a rate limit, or its group's other responses.
        num_attempts: Number of calls.
        failure_names: Names of the failure for `retry_on`: "raised", "timed_out" or "bad_value", and the names of the
            exception's classes.
    """

    result: RewardResult | None = None
    failure: str | None = None
    reward_s: float = 0.0
    wait_s: float = 0.0
    num_attempts: int = 1
    failure_names: tuple[str, ...] = ()


class RewardScorer:
    """Scores responses. A call that raises, hangs or returns no number is a failure, never a silent zero.

    A quick function (see `quick`) is called in place. Any other `def` runs in one thread per group, its responses one
    after another, so that a hanging call can be abandoned. An `async def` runs for all responses at once.
    """

    @converts_arguments
    def __init__(
        self,
        function: RewardFunction,
        *,
        timeout_s: Annotated[float, Gt(0)] | None = 30.0,
        max_concurrency: PositiveInt = 32,
        max_calls_per_s: PositiveFloat | None = None,
        failures: FailurePolicy | None = None,
    ) -> None:
        """Store how to call the function.

        Args:
            function: The reward function.
            timeout_s: Maximum seconds of one call, without the start of its worker process; None sets no limit. Quick
                functions have none.
            max_concurrency: Maximum number of threads or async calls at once. A function's own `max_concurrency` also
                applies.
            max_calls_per_s: Maximum calls per second; None sets no limit.
            failures: How to handle failures. None fails the session.

        Raises:
            SettingsError: An option is invalid, or the function does not take one RewardInput.
        """
        self._policy = failures or FailurePolicy()
        self._policy.check()
        self.name = function_name(function)
        check_callable(function, name=self.name)
        self._function: Any = function
        self._timeout_s = NO_LIMIT_S if timeout_s is None else timeout_s
        self._slots = asyncio.Semaphore(min(max_concurrency, getattr(function, "max_concurrency", max_concurrency)))
        self._interval_s = 0.0 if max_calls_per_s is None else 1.0 / max_calls_per_s
        self._next_call_at = 0.0
        self._threads: CallThreads[RewardInput, Scored] = CallThreads(self._call)
        self._score_one: Any = getattr(function, "score_one", function)  # of WeightedReward, which has its own scorers
        self._num_scoring = 0
        self._is_quick = bool(getattr(function, "is_quick", False))
        self._is_async = is_async(function)

    @property
    def num_scoring(self) -> int:
        """Number of responses that are waiting for their rewards."""
        return self._num_scoring

    async def score(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        """Score the responses of one group, in order. Never raises for a single response."""
        self._num_scoring += len(inputs)
        try:
            if self._is_async:
                batches = await asyncio.gather(*(self._timed([given]) for given in inputs))
                scored = [one for batch in batches for one in batch]
            elif self._is_quick:
                scored = await self._attempts(inputs)
            else:
                scored = await self._timed(inputs)
        finally:
            self._num_scoring -= len(inputs)
        if self._policy.on_failure == "zero":
            return [marked(one) for one in scored]
        return scored

    async def rehearse(self, prompt: Prompt) -> None:
        """Score an empty response to a prompt, to find a broken function before any model loads.

        If the function has its own `rehearse(prompt)`, for example because it needs an engine, that is called instead.

        Raises:
            SettingsError: The function fails.
        """
        rehearse = getattr(self._function, "rehearse", None)
        if callable(rehearse):
            await rehearse(prompt)
            return
        (scored,) = await self._attempts([reward_input(prompt, text="", ids=np.empty(0, dtype=np.int32))])
        if scored.failure is not None:
            raise SettingsError(f"the reward fails on an empty response to the first prompt: {scored.failure}")

    def close(self) -> None:
        """Stop the threads, and close the function if it has a `close` method."""
        self._threads.close()
        close = getattr(self._function, "close", None)
        if callable(close):
            close()

    async def _timed(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        """Score all inputs, and record how long each one waited."""
        started_at = time.perf_counter()
        scored = await self._attempts(inputs)
        took_s = time.perf_counter() - started_at
        return [replace(one, wait_s=max(took_s - one.reward_s, 0.0)) for one in scored]

    async def _attempts(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        """Score all inputs, then retry those whose failure the policy retries."""
        scored = await self._round(inputs)
        for retry in range(self._policy.max_retries):
            again = [
                index for index, one in enumerate(scored) if not {*one.failure_names}.isdisjoint(self._policy.retry_on)
            ]
            if not again:
                break
            pause_s = self._policy.pause_s(retry)
            await asyncio.sleep(pause_s)
            for index, one in zip(again, await self._round([inputs[index] for index in again]), strict=True):
                scored[index] = _after(scored[index], one, pause_s=pause_s)
        return scored

    async def _round(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        if self._is_async:
            return [await self._call_async(given) for given in inputs]
        if not self._interval_s:
            return await self._call_blocking(inputs)
        scored: list[Scored] = []
        for given in inputs:
            await self._may_call()
            scored += await self._call_blocking([given])
        return scored

    async def _may_call(self) -> None:
        """Wait until the rate limit lets the next call start. The first one starts at once."""
        now = time.monotonic()
        starts_at = max(self._next_call_at, now)
        self._next_call_at = starts_at + self._interval_s
        if starts_at > now:
            await asyncio.sleep(starts_at - now)

    async def _call_async(self, given: RewardInput) -> Scored:
        async with self._slots:
            await self._may_call()
            clock, context = CallClock(), copy_context()
            context.run(CLOCK.set, clock)
            call = asyncio.create_task(self._await_call(given), context=context)
            try:
                while not call.done() and (left_s := self._timeout_s - clock.used_s()) > 0:
                    await asyncio.wait({call}, timeout=max(left_s, 0.01))
            except asyncio.CancelledError:
                call.cancel()
                raise
            if call.done():
                return call.result()
            call.cancel()  # and abandon it: a function can refuse to be cancelled
            return self._timed_out(given)

    async def _await_call(self, given: RewardInput) -> Scored:
        started_at = time.perf_counter()
        try:
            value = await self._score_one(given)
        except BaseException as error:
            if is_meant_for_us(error):
                raise
            return self._raised(given, error, started_at=started_at)
        return self._checked(given, value, started_at=started_at)

    async def _call_blocking(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        if self._is_quick:
            return [self._call(given) for given in inputs]
        scored: list[Scored] = []
        async with self._slots:
            while len(scored) < len(inputs):
                scored += await self._threads.run(inputs[len(scored) :], timeout_s=self._timeout_s)
                if len(scored) < len(inputs):
                    scored.append(self._timed_out(inputs[len(scored)]))
        return scored

    def _call(self, given: RewardInput) -> Scored:
        started_at = time.perf_counter()
        try:
            value = self._function(given)
        except BaseException as error:
            if is_meant_for_us(error):
                raise
            return self._raised(given, error, started_at=started_at)
        return self._checked(given, value, started_at=started_at)

    def _checked(self, given: RewardInput, value: Any, *, started_at: float) -> Scored:
        if isinstance(value, Scored):  # of WeightedReward
            if value.result is None:
                return value
            checked = self._checked(given, value.result, started_at=started_at)
            return replace(checked, reward_s=value.reward_s, num_attempts=value.num_attempts)
        reward_s = time.perf_counter() - started_at
        try:
            return Scored(result=read_output(value), reward_s=reward_s)
        except DataError as error:
            failure = f"{self._about(given)} returned {error}"
        except Exception as error:  # reading a user's own mapping or number can raise anything
            failure = (
                f"{self._about(given)} returned a {type(value).__name__} that cannot be read ({preview_error(error)})"
            )
        return Scored(failure=failure, reward_s=reward_s, failure_names=("bad_value",))

    def _raised(self, given: RewardInput, error: BaseException, *, started_at: float) -> Scored:
        failure = describe_raised(self._about(given), error)
        names = [cls.__name__ for cls in type(error).__mro__]
        if not isinstance(error, NOT_WORTH_A_RETRY):
            names.append("raised")
        return Scored(failure=failure, reward_s=time.perf_counter() - started_at, failure_names=tuple(names))

    def _timed_out(self, given: RewardInput) -> Scored:
        failure = f"{self._about(given)} did not return within {self._timeout_s} s and was abandoned"
        return Scored(failure=failure, reward_s=self._timeout_s, failure_names=("timed_out",))

    def _about(self, given: RewardInput) -> str:
        return f"reward function {self.name!r} on prompt {given.prompt_uid}"


def reward_input(
    prompt: Prompt, *, text: str, ids: Any, finish_reason: Any = "stop", begins_thinking: bool = False
) -> RewardInput:
    """Return the input of a reward function for a response to a prompt."""
    return RewardInput(
        prompt_uid=prompt.uid,
        response_text=text,
        response_ids=ids,
        messages=prompt.messages,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        columns=prompt.columns,
        finish_reason=finish_reason,
        begins_thinking=begins_thinking,
    )


def is_async(function: Any) -> bool:
    """Return True for an `async def`, and for an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def function_name(function: Any) -> str:
    """Return a function's name for messages: `file.py:name` for a user's file, else module and name."""
    named = function
    while isinstance(named, functools.partial):
        named = named.func
    if not hasattr(named, "__qualname__"):
        named = type(named)
    name, module = named.__qualname__, getattr(named, "__module__", "") or ""
    if module.startswith("rl_file_"):
        code = getattr(named, "__code__", None)
        return f"{Path(code.co_filename).name if code else module}:{name}"
    return name if module.startswith("rl_rollout.") else f"{module}.{name}"


def _after(first: Scored, then: Scored, *, pause_s: float) -> Scored:
    """Return an attempt, with the times and number of attempts of those before it."""
    num_attempts = first.num_attempts + 1
    return replace(
        then,
        failure=then.failure and f"{then.failure} (the last of {num_attempts} attempts)",
        reward_s=first.reward_s + pause_s + then.reward_s,
        num_attempts=num_attempts,
    )


def marked(scored: Scored) -> Scored:
    """Turn a failure into a reward of 0 with `reward_failed` = 1, and mark a success with `reward_failed` = 0."""
    if scored.result is None:
        mark = RewardResult(
            reward=0.0, components={FAILED_COMPONENT: 1.0}, extras={FAILURE_EXTRA: scored.failure or "unknown"}
        )
        return replace(scored, result=mark, failure=None)
    components = {**scored.result.components, FAILED_COMPONENT: 0.0}
    return replace(scored, result=replace(scored.result, components=components))
