"""Tokens of a run with both logprobs: the engine's, and the learner's before its update."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_metrics.run_files.rollout_log import RolloutRow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNKNOWN_VERSION = -1
LEAST_DOUBT = 0.02
"""Minimum doubt; below it, a token is nearly certain, and its difference mostly rounding."""
MOST_LOGPROB = 1e-3
"""Maximum valid logprob: 0 apart from rounding."""
MAX_TOKENS = 400_000
"""Maximum number of tokens. Beyond it, every second trajectory is dropped repeatedly, to keep the whole run covered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPairs:
    """Sampled tokens with logprobs of both sides; all columns are [N].

    Attributes:
        rollout: float64, the engine's logprobs.
        policy: float64, the learner's logprobs before its update.
        entropy: float64, entropy of the learner's distribution in nats; NaN if unknown.
        version: int64, version of the weights that sampled the token, according to the engine; -1 if unknown.
        policy_version: int64, version of the learner before its update.
        step: int64, step that trained the token.
        position: int64, position in the response, from 0.
        trajectory: int64, index of the trajectory in the run.
    """

    rollout: Floats
    policy: Floats
    entropy: Floats
    version: Ints
    policy_version: Ints
    step: Ints
    position: Ints
    trajectory: Ints

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def diff(self) -> Floats:
        """The learner's minus the engine's logprob."""
        return self.policy - self.rollout

    @property
    def staleness(self) -> Ints:
        """Versions between the engine's weights and the learner's; -1 if unknown."""
        behind: Ints = np.where(self.version < 0, UNKNOWN_VERSION, np.maximum(self.policy_version - self.version, 0))
        return behind

    @property
    def doubt(self) -> Floats:
        """1 - p, at least 0.02; to first order, a change of a token's logit changes its logprob by this factor."""
        p = np.exp(np.maximum(np.minimum(self.policy, self.rollout), -50.0))
        doubt: Floats = np.maximum(1.0 - p, LEAST_DOUBT)
        return doubt


def read_pairs(rows: Iterable[RolloutRow], *, max_tokens: int = MAX_TOKENS) -> TokenPairs:
    """Return the tokens of trajectories; trajectories without both columns have none."""
    parts: list[Floats] = []
    num_tokens, stride = 0, 1
    for index, row in enumerate(rows):
        if index % stride:
            continue
        part = _part(index, row)
        if part is None:
            continue
        parts.append(part)
        num_tokens += part.shape[1]
        while num_tokens > max_tokens and len(parts) > 1:
            stride *= 2
            parts = parts[::2]
            num_tokens = sum(part.shape[1] for part in parts)
    return _joined(parts)


def _part(index: int, row: RolloutRow) -> Floats | None:
    """Return the [8, n] columns of one trajectory, or None without a token to compare."""
    if not {"rollout_logprobs", "policy_logprobs"} <= row.columns.keys() or not row.tokens:
        return None
    size = len(row.tokens)
    rollout, policy = (np.array(row.columns[name]) for name in ("rollout_logprobs", "policy_logprobs"))
    is_known = np.array(row.mask, dtype=bool) & np.isfinite(rollout) & np.isfinite(policy)
    is_known &= (rollout <= MOST_LOGPROB) & (policy <= MOST_LOGPROB)
    if not is_known.any():
        return None
    entropy = np.array(row.columns.get("entropy", (np.nan,) * size))
    version = np.array(row.columns.get("versions", (UNKNOWN_VERSION,) * size), dtype=np.float64)
    try:
        same = [np.full(size, float(value)) for value in (row.policy_version, row.step, index)]
    except OverflowError:  # a version beyond every float
        return None
    columns = np.stack([rollout, policy, entropy, version, *same, np.arange(float(size))])
    part: Floats = columns[:, is_known]
    return part


def _joined(parts: Sequence[Floats]) -> TokenPairs:
    matrix = np.concatenate(parts, axis=1) if parts else np.zeros((8, 0))
    rollout, policy, entropy = matrix[:3]
    version, policy_version, step, trajectory, position = (_whole(column) for column in matrix[3:])
    return TokenPairs(
        rollout=rollout,
        policy=policy,
        entropy=entropy,
        version=version,
        policy_version=policy_version,
        step=step,
        position=position,
        trajectory=trajectory,
    )


def _whole(column: Floats) -> Ints:
    bounded: Ints = np.clip(column, -1.0, 2.0**62).astype(np.int64)
    return bounded
