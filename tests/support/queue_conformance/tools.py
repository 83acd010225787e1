"""Tasks and rows of these checks."""

from rl_core.data.batch import Batch
from rl_core.queue.interface import TaskSpec
from rl_core.testing.rows import make_trajectory

REWARD = TaskSpec(name="reward", needs=frozenset({"input_ids"}), gives=frozenset({"reward"}))
LOG = TaskSpec(name="log", needs=frozenset({"reward"}))


def batch_of(*keys: tuple[str, int, int]) -> Batch:
    """Return rows with these keys; the reward is the session's index."""
    return Batch.from_trajectories([make_trajectory(*key, reward=float(key[1])) for key in keys])
