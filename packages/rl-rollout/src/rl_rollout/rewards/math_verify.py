"""Compares mathematical expressions with the math-verify library, in processes that can be killed."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from rl_core.data import Json
from rl_core.errors import DataError, DeadlineError, MissingExtraError
from rl_core.record_fields import PositiveFloat, PositiveInt, converts_arguments
from rl_rollout.rewards.answers import MAX_TAIL, boxed_answer
from rl_rollout.rewards.calls import current_clock
from rl_rollout.rewards.check_processes import CheckProcesses
from rl_rollout.rewards.math_notation import plain_math
from rl_rollout.rewards.protocol import RewardInput, RewardResult
from rl_rollout.rewards.quantities import quantity, same_units, same_values
from rl_rollout.rewards.rules import voted

MAX_QUICK = 200
"""Maximum length of numbers that are compared in place, in characters."""
WORKER = "rl_rollout.rewards.math_equality"


class MathVerify:
    r"""Reward 1 if the response's answer equals the ground truth mathematically, else 0.

    The answer is the content of the last `\boxed{}` after the response's thinking, or else what `final_answer` finds.
    Numbers in digits are compared exactly, equations as equations, and other expressions with the library, at several
    points. A comparison that takes longer than timeout_s counts as wrong, with the component `math_verify_timed_out` =
    1. The extra `pred` is the answer, for majority votes. Worker processes start at the first use and always end with
    this process.
    """

    @converts_arguments
    def __init__(self, *, timeout_s: PositiveFloat = 3.0, num_workers: PositiveInt = 2) -> None:
        """Check that the library is installed. No process starts yet.

        Args:
            timeout_s: Maximum seconds of one comparison.
            num_workers: Number of processes; each uses about 80 MB.

        Raises:
            MissingExtraError: math-verify is not installed.
            SettingsError: A number is not above 0.
        """
        if find_spec("math_verify") is None:
            raise MissingExtraError("math_verify needs math-verify. Install rl-rollout[math] as the README says.")
        self.max_concurrency = num_workers  # so that the scorer's timeout excludes waits for a process
        self._processes = CheckProcesses(WORKER, timeout_s=timeout_s, num_processes=num_workers)

    async def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            DataError: The row has no ground truth, or one that is not an expression.
            RoleError: The worker cannot start, or died.
        """
        if given.ground_truth is None:
            raise DataError("the row has no ground truth, so math_verify cannot judge its responses. Repair the row.")
        gold, text = str(given.ground_truth), given.final_text
        answer = boxed_answer(text)
        if answer is None:
            verdict = await self._verdict({"gold": gold, "response": text[-MAX_TAIL:]})
            is_equal, answer = verdict.get("is_equal"), verdict.get("answer")
        else:
            is_equal = await self.compare(gold, answer)
        reward = float(is_equal or False)
        components = {"accuracy": reward, "math_verify_timed_out": float(is_equal is None)}
        prediction = plain_math(answer) if answer and len(answer) <= MAX_QUICK else None
        return replace(voted(reward, prediction), components=components)

    async def compare(self, gold: str, answer: str) -> bool | None:
        """Return True if an answer equals the gold answer; None if there is no verdict in time.

        Raises:
            DataError: The gold answer is not an expression.
            RoleError: The worker cannot start, or died.
        """
        if len(gold) <= MAX_QUICK and len(answer) <= MAX_QUICK:
            first, second = quantity(plain_math(gold)), quantity(plain_math(answer))
            if (has_same_value := same_values(first, second)) is not None:
                return same_units(first, second) and has_same_value
        return (await self._verdict({"gold": gold, "answer": answer})).get("is_equal")

    def close(self) -> None:
        """Stop the workers. Can be called twice."""
        self._processes.close()

    async def _verdict(self, request: Mapping[str, Json]) -> dict[str, Any]:
        """Return the worker's verdict; empty if there is none in time."""
        current_clock().pause()  # until a process is ready
        try:
            return await asyncio.to_thread(self._processes.check, request) or {}
        except DeadlineError:
            return {}
