"""Tasks, columns and rows of these checks."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.columns import COLUMNS, ColumnSpec, declare_column
from rl_core.data.records import NO_VERSION, Trajectory
from rl_core.queue.interface import TaskSpec
from rl_core.testing.fixtures import make_trajectory

TEACHER = TaskSpec(name="teacher", needs=frozenset({"input_ids"}), gives=frozenset({"teacher_logprobs"}))
TRAIN_LATE = TaskSpec(name="train", needs=frozenset({"input_ids", "reference_logprobs"}))
REWARD = TaskSpec(name="reward", needs=frozenset({"input_ids"}), gives=frozenset({"reward"}))
LOG = TaskSpec(name="log", needs=frozenset({"reward"}))

TOP_K = 4
OWN = {
    "own_top_logprobs": ColumnSpec(dtype="float32", is_ragged=True, meaning="The teacher's largest logprobs."),
    "own_top_ids": ColumnSpec(dtype="int32", is_ragged=True, meaning="The tokens of these."),
    "own_embedding": ColumnSpec(dtype="float16", is_ragged=False, meaning="A few numbers of each row."),
}
"""User-defined columns, which `declared` declares for one check."""


def batch_of(*keys: tuple[str, int, int]) -> Batch:
    """Return rows with these keys; the reward is the session's index."""
    return Batch.from_trajectories([make_trajectory(*key, reward=float(key[1])) for key in keys])


@contextmanager
def declared() -> Iterator[None]:
    """Declare columns for one check."""
    for name, spec in OWN.items():
        declare_column(name, spec)
    try:
        yield
    finally:
        for name in OWN:
            COLUMNS.pop(name, None)


def sampled_by(prompt_uid: str, session_index: int, *versions: int, output_index: int = 0) -> Trajectory:
    """Create a trajectory with one token of each of these policy versions."""
    return make_trajectory(
        prompt_uid,
        session_index,
        output_index,
        num_response_tokens=len(versions),
        policy_versions=np.asarray([NO_VERSION, NO_VERSION, *versions], dtype=np.int32),
    )
