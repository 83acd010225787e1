"""Inputs and results of reward functions."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from rl_core.data import FinishReason, IntArray, Json
from rl_core.record_fields import Axes, record


@record
class AgentRun:
    """How the program of an agent ran.

    Attributes:
        ended: "exited" by itself or by a signal, or the limit that ended it: "wall_time", "output", and in a sandbox
            "memory" or "processes".
        exit_code: Negative for a signal; None when a limit ended it.
        stdout: The end of what it printed.
        stderr: The end of its errors.
        workspace: Path of its working folder, there until the reward is given.
    """

    ended: str
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    workspace: str = ""


@record
class RewardInput:
    """One response to judge.

    Attributes:
        prompt_uid: uid of its prompt.
        response_text: The response as text, without special tokens.
        response_ids: [R] int32, the response as sampled.
        messages: The prompt's messages; empty for a plain prompt, which is in columns["prompt"].
        ground_truth: The row's ground truth.
        data_source: The row's data source.
        columns: All columns of the row.
        finish_reason: Why the response ended.
        agent: How the program with this last response ran. None for other loops and for stored sessions.
    """

    prompt_uid: str
    response_text: str
    response_ids: Annotated[IntArray, Axes("R")]
    messages: tuple[Mapping[str, Json], ...] = ()
    ground_truth: Json = None
    data_source: str = "default"
    columns: Mapping[str, Json] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"
    agent: AgentRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The result of a reward function.

    Attributes:
        reward: The scalar to train on.
        components: Named parts and other measures, each reported as a metric.
        extras: Any other JSON to store with the trajectory, such as the extracted answer.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Json] = field(default_factory=dict)


RewardOutput = float | Mapping[str, Any] | RewardResult
"""A number; or a mapping with "reward" and components, all numbers; or a RewardResult."""

RewardFunction = Callable[[RewardInput], RewardOutput | Awaitable[RewardOutput]]
"""Any callable of one RewardInput, `def` or `async def`.

A plain `def` runs in a thread, the responses of one group after another, so it may block. One marked
with `quick` runs on the event loop. An `async def` runs on the event loop, all responses at once. A
function with a `close` method is closed with its scorer.
"""


def quick(function: Callable[[RewardInput], RewardOutput]) -> Callable[[RewardInput], RewardOutput]:
    """Mark a function that takes microseconds and cannot hang. It runs in place, without a timeout."""
    function.is_quick = True  # type: ignore[attr-defined]
    return function
