"""The records of a rollout: prompts, trajectories, groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import ShapeError

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Json = Any
"""A JSON value: None, bool, int, float, str, list or dict of these."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a response ended: an end token, the length limit, or an abort."""

NO_VERSION = -1
"""policy_versions of a token that no policy sampled (prompt, tool output)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem given to the policy.

    Attributes:
        uid: Unique in the run; the group's id.
        input_ids: [P] int32 prompt tokens, generation prompt included.
        messages: Chat messages as given (`role`, `content`), before the template.
        data_source: Name of the data set, for routing and validation by source.
        ground_truth: What the reward compares with; any JSON value.
        columns: All columns of the row, for the reward function.
    """

    uid: str
    input_ids: IntArray
    messages: tuple[Mapping[str, Json], ...] = ()
    data_source: str = "default"
    ground_truth: Json = None
    columns: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds that a session took, and how often its requests were preempted.

    `reward_wait_s` is the wait until a reward function that was busy had time for the session.
    """

    generate_s: float = 0.0
    tools_s: float = 0.0
    reward_s: float = 0.0
    reward_wait_s: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One token sequence that trains.

    Attributes:
        prompt_uid: uid of its prompt, which is its group's id.
        session_index: Which run of the agent loop on this prompt, from 0.
        output_index: Which trajectory of that session, from 0.
        input_ids: [T] int32 prompt and response tokens.
        loss_mask: [T] bool, True where the token was sampled and trains.
        rollout_logprobs: [T] float32, 0 where loss_mask is False.
        policy_versions: [T] int32 version that sampled each token, NO_VERSION elsewhere.
        finish_reason: Why the last response ended.
        reward: Scalar reward, None while not yet scored.
        reward_components: Named parts of the reward.
        timings: What the session cost.
        extras: Anything else, as JSON.
    """

    prompt_uid: str
    session_index: int
    output_index: int = 0
    input_ids: IntArray
    loss_mask: BoolArray
    rollout_logprobs: FloatArray
    policy_versions: IntArray
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    timings: Timings = Timings()
    extras: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the four token arrays are 1-D and equally long."""
        shape = self.input_ids.shape
        for name in ("loss_mask", "rollout_logprobs", "policy_versions"):
            found = getattr(self, name).shape
            if len(shape) != 1 or found != shape:
                raise ShapeError(
                    f"{name} of trajectory {self.prompt_uid}/{self.session_index}/{self.output_index} must have "
                    f"input_ids' shape [T]; input_ids is {list(shape)}, {name} is {list(found)}."
                )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first sampled one; all of them when none was sampled."""
        sampled = np.flatnonzero(self.loss_mask)
        return int(sampled[0]) if len(sampled) else len(self.input_ids)

    @property
    def num_response_tokens(self) -> int:
        """Tokens from the first sampled one to the end."""
        return len(self.input_ids) - self.num_prompt_tokens
