"""The tokens of a run with both logprobs: the engine's, and the learner's just before its update."""

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
"""Below it a token is all but certain, and its difference mostly rounding."""
MOST_LOGPROB = 1e-3
"""Rounding apart, a logprob is at most 0; what is above is none."""
MAX_TOKENS = 400_000
"""With more, every second trajectory is left out, as often as needed: what is looked at stays spread over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPairs:
    """Sampled tokens with logprobs of both sides; all columns are [N].

    Attributes:
        rollout: float64, the engine's logprobs.
        policy: float64, the learner's.
        entropy: float64, of the learner's distribution; NaN where unknown.
        version: int64, of the weights that sampled the token, as the engine says; -1 where unknown.
        policy_version: int64, of the learner before its update.
        step: int64.
        position: int64, in the response, from 0.
        trajectory: int64, which of the run.
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
        """Versions between the engine's weights and the learner's; -1 where unknown."""
        behind: Ints = np.where(self.version < 0, UNKNOWN_VERSION, np.maximum(self.policy_version - self.version, 0))
        return behind

    @property
    def doubt(self) -> Floats:
        """1 - p, and 0.02 at least: to first order, a change of a token's logit changes its logprob by this factor."""
        p = np.exp(np.maximum(np.minimum(self.policy, self.rollout), -50.0))
        doubt: Floats = np.maximum(1.0 - p, LEAST_DOUBT)
        return doubt


def read_pairs(rows: Iterable[RolloutRow], *, max_tokens: int = MAX_TOKENS) -> TokenPairs:
    """The tokens of trajectories; those that lack either column give none."""
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
    """[8, n] columns of one trajectory; None where it has no token to compare."""
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
