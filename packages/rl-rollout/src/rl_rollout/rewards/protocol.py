"""Inputs and results of reward functions."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from rl_core.data import FinishReason, IntArray, Json
from rl_core.record_fields import Axes, record
from rl_rollout.rewards.answers import final_text


@record
class AgentRun:
    """Outcome of an agent's program.

    Attributes:
        ended: "exited" (by itself or by a signal), or the limit that ended it: "wall_time", "output", or, in a sandbox,
            "memory" or "processes".
        exit_code: Exit code; negative for a signal, None if a limit ended the program.
        stdout: End of its standard output.
        stderr: End of its standard error.
        workspace: Path of its working folder, which exists until the reward is computed.
    """

    ended: str
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    workspace: str = ""


@record
class RewardInput:
    """One response to score.

    Attributes:
        prompt_uid: uid of the prompt.
        response_text: The response as text, without special tokens.
        response_ids: [R] int32, tokens of the response as sampled.
        messages: Messages of the prompt; empty for a plain prompt, whose text is in columns["prompt"].
        ground_truth: The row's ground truth.
        data_source: The row's data source.
        columns: All columns of the row.
        finish_reason: Why the response ended.
        begins_thinking: True if the prompt opens the thinking, so that the response begins inside it.
        agent: Outcome of the agent's program, on its last response; None for other loops and for stored sessions.
    """

    prompt_uid: str
    response_text: str
    response_ids: Annotated[IntArray, Axes("R")]
    messages: tuple[Mapping[str, Json], ...] = ()
    ground_truth: Json = None
    data_source: str = "default"
    columns: Mapping[str, Json] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"
    begins_thinking: bool = False
    agent: AgentRun | None = None

    @property
    def final_text(self) -> str:
        """Return the response after its thinking; empty if the thinking does not end."""
        return final_text(self.response_text, begins_thinking=self.begins_thinking)


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

A plain `def` runs in a thread, one response of a group after another, so it may block. A function marked with `quick`
runs on the event loop. An `async def` runs on the event loop, for all responses concurrently. A function's `close`
method is called when its scorer closes.
"""


def quick(function: Callable[[RewardInput], RewardOutput]) -> Callable[[RewardInput], RewardOutput]:
    """Mark a function that takes microseconds and cannot hang. It runs in place, without a timeout."""
    function.is_quick = True  # type: ignore[attr-defined]
    return function
