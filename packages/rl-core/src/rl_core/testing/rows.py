"""Prompts and trajectories whose tokens identify their row."""

from typing import Any

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.columns import column_dtype
from rl_core.data.ragged import Ragged
from rl_core.data.records import NO_VERSION, Prompt, Trajectory


def make_prompt(uid: str) -> Prompt:
    """Create a prompt of two tokens."""
    return Prompt(uid=uid, input_ids=np.asarray([1, 2], dtype=np.int32))


def make_prompts(num_prompts: int) -> list[Prompt]:
    """Create prompts p0, p1 and so on."""
    return [make_prompt(f"p{index}") for index in range(num_prompts)]


def make_trajectory(
    prompt_uid: str, session_index: int, output_index: int = 0, *, num_response_tokens: int = 3, **fields: Any
) -> Trajectory:
    """Create a trajectory of two prompt tokens, then `session_index`, `output_index` and zeros.

    Args:
        prompt_uid: uid of the prompt.
        session_index: Index of the session.
        output_index: Index of the trajectory within the session.
        num_response_tokens: Number of sampled tokens, all trained, with logprobs of -0.5.
        **fields: Other fields of `Trajectory`; the reward defaults to 1.0.
    """
    response = [session_index, output_index, *[0] * num_response_tokens][:num_response_tokens]
    is_sampled = np.asarray([False] * 2 + [True] * num_response_tokens)
    return Trajectory(
        **{
            "prompt_uid": prompt_uid,
            "session_index": session_index,
            "output_index": output_index,
            "input_ids": np.asarray([1, 2, *response], dtype=np.int32),
            "loss_mask": is_sampled,
            "rollout_logprobs": np.where(is_sampled, -0.5, 0.0).astype(np.float32),
            "policy_versions": np.where(is_sampled, 0, NO_VERSION).astype(np.int32),
            "reward": 1.0,
            **fields,
        }
    )


def ragged_like(batch: Batch, name: str, rows: list[float]) -> Ragged:
    """Create a ragged column aligned with a batch, each row filled with one value.

    Args:
        batch: Rows with `input_ids`.
        name: Name of the new column, which determines its dtype.
        rows: [N] values, one per row.
    """
    lengths = batch.ragged("input_ids").lengths
    return Ragged.from_rows(
        [np.full(length, value) for length, value in zip(lengths, rows, strict=True)], dtype=column_dtype(name)
    )
