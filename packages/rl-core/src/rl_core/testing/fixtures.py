"""Fixtures of tests: rows whose tokens identify them, a manual clock, and waits for conditions."""

import mmap
import os
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.columns import column_dtype
from rl_core.data.ragged import Ragged
from rl_core.data.records import NO_VERSION, Prompt, Trajectory

NOW = struct.Struct("d")


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


class FakeClock:
    """A clock that advances only when a test calls `advance`, shared by all processes that receive it."""

    def __init__(self, now: float = 1000.0) -> None:
        """Start at `now`."""
        descriptor, path = tempfile.mkstemp(prefix="fake-clock-")
        os.write(descriptor, NOW.pack(now))
        os.close(descriptor)
        self._open(path)
        weakref.finalize(self, Path(path).unlink, missing_ok=True)

    def _open(self, path: str) -> None:
        self._path = path
        self.num_reads = 0
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NOW.size)

    @classmethod
    def _at(cls, path: str) -> "FakeClock":
        self = cls.__new__(cls)
        self._open(path)
        return self

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Pickle as the same clock, within this host."""
        return FakeClock._at, (self._path,)

    def __call__(self) -> float:
        """Return the current time in seconds."""
        self.num_reads += 1
        now: float = NOW.unpack_from(self._memory)[0]
        return now

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        NOW.pack_into(self._memory, 0, NOW.unpack_from(self._memory)[0] + seconds)


def wait_until(condition: Callable[[], bool], what: str, *, deadline_s: float = 60.0) -> None:
    """Poll until a condition holds.

    Raises:
        TimeoutError: The condition did not become true in time; the message names it.
    """
    ends_at = time.monotonic() + deadline_s
    never = threading.Event()
    while not condition():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"timed out after {deadline_s:g} s waiting for {what}.")
        never.wait(0.002)
