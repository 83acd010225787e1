"""Tokens of a run with both logprobs: the engine's, and the learner's before its update."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_metrics.run_files.history import FloatColumn, IntColumn
from rl_metrics.run_files.rollout_log import RolloutRow

Bools = NDArray[np.bool_]

UNKNOWN_VERSION = -1
MOST_LOGPROB = 1e-3
"""Maximum valid logprob: 0 apart from rounding."""
MAX_TOKENS = 400_000
"""Maximum number of tokens. Beyond it, every second trajectory is dropped repeatedly, to keep the whole run covered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPairs:
    """Sampled tokens with logprobs of both sides; all columns are [N].

    Attributes:
        diff: float64, the learner's logprob before its update minus the engine's.
        version: int64, version of the weights that sampled the token, according to the engine; -1 if unknown.
        policy_version: int64, version of the learner before its update.
        step: int64, step that trained the token.
        position: int64, position in the response, from 0.
    """

    diff: FloatColumn
    version: IntColumn
    policy_version: IntColumn
    step: IntColumn
    position: IntColumn

    def __len__(self) -> int:
        return len(self.diff)

    @property
    def staleness(self) -> IntColumn:
        """Versions between the engine's weights and the learner's; -1 if unknown."""
        age = np.maximum(self.policy_version - self.version, 0)
        behind: IntColumn = np.where(self.version < 0, UNKNOWN_VERSION, age)
        return behind


def read_pairs(rows: Iterable[RolloutRow]) -> TokenPairs:
    """Return the tokens of trajectories; trajectories without both columns have none."""
    parts: list[FloatColumn] = []
    num_tokens, stride = 0, 1
    for index, row in enumerate(rows):
        if index % stride or (part := _columns(row)) is None:
            continue
        parts.append(part)
        num_tokens += part.shape[1]
        while num_tokens > MAX_TOKENS and len(parts) > 1:
            stride *= 2
            parts = parts[::2]
            num_tokens = sum(part.shape[1] for part in parts)
    diff, *others = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0))
    version, policy_version, step, position = (np.clip(column, -1.0, 2.0**62).astype(np.int64) for column in others)
    return TokenPairs(diff=diff, version=version, policy_version=policy_version, step=step, position=position)


def _columns(row: RolloutRow) -> FloatColumn | None:
    """Return the [5, n] columns of one trajectory, or None without a token to compare."""
    if not {"rollout_logprobs", "policy_logprobs"} <= row.columns.keys() or not row.tokens:
        return None
    size = len(row.tokens)
    rollout, policy = (np.array(row.columns[name]) for name in ("rollout_logprobs", "policy_logprobs"))
    is_known = np.array(row.mask, dtype=bool) & np.isfinite(rollout) & np.isfinite(policy)
    is_known &= (rollout <= MOST_LOGPROB) & (policy <= MOST_LOGPROB)
    version = np.array(row.columns.get("versions", (UNKNOWN_VERSION,) * size), dtype=np.float64)
    try:
        same = [np.full(size, float(value)) for value in (row.policy_version, row.step)]
    except OverflowError:  # a version beyond every float
        return None
    part: FloatColumn = np.stack([policy - rollout, version, *same, np.arange(float(size))])[:, is_known]
    return part if part.size else None
