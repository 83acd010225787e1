"""Records of a rollout: prompts, trajectories and groups."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rl_core.record_fields import Axes, record

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ExpertArray = NDArray[np.int16]
"""[tokens, layers, top_k] experts that a mixture-of-experts model used per token; -1 where unknown."""
Json = Any
"""A JSON value: None, bool, int, float, str, list or dict."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a response ended: an end token, the length limit, or an abort."""

REWARD_NOISE = 1e-6
"""Largest difference of equal rewards: some roundings in float32, whose unit is 1.2e-7, of terms of order 1.

Larger rewards round more, in proportion. Smaller ones may be sums of such terms, so rewards that differ by less must be
scaled up.
"""

NO_VERSION = -1
"""policy_versions of a token that no policy sampled (prompt, tool output)."""


@record
class ImageSpan:
    """An image among the tokens of a prompt or trajectory.

    Attributes:
        digest: SHA-256 of the encoded image, in hexadecimal; see `rl_core.images.ImageStore`.
        start: Index of the first token that stands for it.
        length: Number of tokens from the first to the last one.
    """

    digest: str
    start: int
    length: int


@record
class Prompt:
    """One problem for the policy.

    Attributes:
        uid: Unique in the run; also the group's id.
        input_ids: [P] int32 prompt tokens, including the generation prompt.
        messages: Chat messages (`role`, `content`) before the template.
        data_source: Name of the data set, for routing and for validation by source.
        ground_truth: The reference answer for the reward; any JSON value.
        columns: All columns of the row, for the reward function.
        images: Images among the tokens, in their order.
    """

    uid: str
    input_ids: Annotated[IntArray, Axes("P")]
    messages: tuple[Mapping[str, Json], ...] = ()
    data_source: str = "default"
    ground_truth: Json = None
    columns: Mapping[str, Json] = field(default_factory=dict)
    images: tuple[ImageSpan, ...] = ()


@record
class Timings:
    """Durations of a session in seconds, and its requests' number of preemptions.

    `reward_wait_s` is the wait for a busy reward function.
    """

    generate_s: float = 0.0
    tools_s: float = 0.0
    reward_s: float = 0.0
    reward_wait_s: float = 0.0
    preemptions: int = 0


@record
class Trajectory:
    """One token sequence that trains.

    Attributes:
        prompt_uid: uid of its prompt, also its group's id.
        session_index: Index of the session among those of its prompt, from 0.
        output_index: Index of the trajectory in its session, from 0.
        parent: output_index of the trajectory from which this one branches; None if it starts from the prompt.
        input_ids: [T] int32 prompt and response tokens.
        loss_mask: [T] bool, True where the token was sampled and trains.
        rollout_logprobs: [T] float32, 0 where loss_mask is False.
        policy_versions: [T] int32 policy version that sampled each token, NO_VERSION elsewhere.
        finish_reason: Why the last response ended.
        reward: Scalar reward; None until scored.
        reward_components: Named parts of the reward.
        reward_baseline: Reward of the greedy session of its prompt, for ReMax; None without one.
        timings: Durations of the session.
        routed_experts: [T, layers, top_k] int16 experts that a mixture-of-experts model used; -1 where unknown.
        nucleus_ids: [T, K] int32 tokens that top-k and top-p kept when the token was sampled, -1 for none; None without
            truncation.
        images: Images among the tokens, in their order.
        extras: Anything else, as JSON.
    """

    prompt_uid: str
    session_index: int
    output_index: int = 0
    parent: int | None = None
    input_ids: Annotated[IntArray, Axes("T")]
    loss_mask: Annotated[BoolArray, Axes("T")]
    rollout_logprobs: Annotated[FloatArray, Axes("T")]
    policy_versions: Annotated[IntArray, Axes("T")]
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    reward_baseline: float | None = None
    timings: Timings = Timings()
    routed_experts: Annotated[ExpertArray | None, Axes("T", "layers", "top_k")] = None
    nucleus_ids: Annotated[IntArray | None, Axes("T", "K")] = None
    images: tuple[ImageSpan, ...] = ()
    extras: Mapping[str, Json] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the first sampled one; all tokens if none was sampled."""
        sampled = np.flatnonzero(self.loss_mask)
        return int(sampled[0]) if len(sampled) else len(self.input_ids)

    @property
    def num_response_tokens(self) -> int:
        """Tokens from the first sampled one to the end."""
        return len(self.input_ids) - self.num_prompt_tokens


def are_equal_rewards(lowest: Any, highest: Any) -> Any:
    """Return True if all rewards between these two differ only by rounding.

    A group of such rewards has nothing to teach, and a division by its standard deviation would amplify the rounding.

    Args:
        lowest: A number, or an array or tensor of any shape.
        highest: The same, not below `lowest`.

    Returns:
        A bool, or an array or tensor of bool in the arguments' shape.
    """
    difference = highest - lowest
    is_noise = difference <= REWARD_NOISE
    return (lowest == highest) | is_noise | (difference <= REWARD_NOISE / 2 * (abs(lowest) + abs(highest)))
