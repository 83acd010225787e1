"""Proof that what trains is what was sampled."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError
from rl_core.records import NO_VERSION, Trajectory
from rl_rollout.engines.protocol import Generation


def audit_trajectory(trajectory: Trajectory, generations: Sequence[Generation]) -> None:
    """Check that each trained token was sampled, with its logprob and version, and all others are masked.

    Args:
        trajectory: What a loop gave.
        generations: What the engine gave to that session, in order. A loop may leave sampled tokens out
            or mask them, but an unbroken run of trained tokens must be an unbroken run of sampled ones.

    Raises:
        DataError: A token breaks this; the message names its position.
    """
    mask = trajectory.loss_mask
    untouched = (trajectory.rollout_logprobs == 0) & (trajectory.policy_versions == NO_VERSION)
    for position in np.flatnonzero(~mask & ~untouched)[:1]:
        raise DataError(
            f"{_name(trajectory)}: token {position} is masked, so its logprob must be 0 and its version {NO_VERSION}; "
            f"found {trajectory.rollout_logprobs[position]} and {trajectory.policy_versions[position]}."
        )
    sampled = _stack(
        *(
            np.concatenate([np.asarray(getattr(generation, name)) for generation in generations] or [np.empty(0)])
            for name in ("token_ids", "logprobs", "policy_versions")
        )
    )
    trained = _stack(trajectory.input_ids, trajectory.rollout_logprobs, trajectory.policy_versions)
    start = 0
    for first, last in _runs(mask):
        start = _find(
            sampled, trained[first:last], start=start, where=f"{_name(trajectory)}: tokens {first}..{last - 1}"
        )


def _stack(*columns: NDArray[np.generic]) -> NDArray[np.float64]:
    """[N, 3] ids, logprobs and versions; float64 holds int32 and float32 exactly."""
    return np.stack([column.astype(np.float64) for column in columns], axis=1)


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _find(sampled: NDArray[np.float64], run: NDArray[np.float64], *, start: int, where: str) -> int:
    """End of the first place at or after `start` where the run was sampled."""
    starts = np.flatnonzero((sampled == run[0]).all(axis=1))
    for place in starts[starts >= start]:
        if np.array_equal(sampled[place : place + len(run)], run):
            return int(place) + len(run)
    raise DataError(
        f"{where} are trained, but the engine sampled no such run with these logprobs and versions. "
        "Mask tokens that the policy did not sample, and never tokenize a response again."
    )


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.prompt_uid}/{trajectory.session_index}/{trajectory.output_index}"
