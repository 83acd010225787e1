"""Prompts and trajectories whose tokens say which row they are."""

from typing import Any

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.columns import column_dtype
from rl_core.data.ragged import Ragged
from rl_core.data.records import NO_VERSION, Prompt, Trajectory


def make_prompt(uid: str) -> Prompt:
    """A prompt of two tokens."""
    return Prompt(uid=uid, input_ids=np.asarray([1, 2], dtype=np.int32))


def make_prompts(num_prompts: int) -> list[Prompt]:
    """Prompts p0, p1 and so on."""
    return [make_prompt(f"p{index}") for index in range(num_prompts)]


def make_trajectory(
    prompt_uid: str, session_index: int, output_index: int = 0, *, num_response_tokens: int = 3, **fields: Any
) -> Trajectory:
    """A trajectory of two prompt tokens, then `session_index`, `output_index` and zeros.

    Args:
        prompt_uid: uid of its prompt.
        session_index: Which session.
        output_index: Which trajectory of the session.
        num_response_tokens: Sampled tokens, all of them trained, with logprobs of -0.5.
        **fields: Other fields of `Trajectory`; the reward is 1.0 when not given.
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
    """A ragged column aligned with a batch, each row filled with one value.

    Args:
        batch: Rows with `input_ids`.
        name: The new column, for its dtype.
        rows: [N] value of each row.
    """
    lengths = batch.ragged("input_ids").lengths
    return Ragged.from_rows(
        [np.full(length, value) for length, value in zip(lengths, rows, strict=True)], dtype=column_dtype(name)
    )
