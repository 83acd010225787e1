"""Sampling of trajectories for a report of limited size."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from rl_metrics.run_files.rollout_log import RolloutRow

WORST_SHARE = 0.25
"""Maximum share of kept trajectories that are chosen for low rewards."""

WORST_BELOW = 0.5
"""Upper limit of a worst case's reward."""


def choose(rows: Iterable[RolloutRow], *, limit: int) -> tuple[NDArray[np.bool_], int]:
    """Choose the trajectories to keep.

    Problems are drawn by a hash of their names: groups stay complete, every problem has the same chance, and reports of
    several runs keep the same problems. The lowest rewards below `WORST_BELOW` among the rest are kept too.

    Args:
        rows: Trajectories in the order of packing.
        limit: Maximum number to keep, at least 1.

    Returns:
        [N] bool, whether each trajectory is kept, and N.
    """
    places, rewards = array("Q"), array("d")
    for row in rows:
        places.append(_place(row.problem or row.prompt_uid))
        rewards.append(row.reward)
    place, reward = np.array(places, dtype=np.uint64), np.array(rewards)
    kept = np.ones(len(place), dtype=bool)
    if len(place) > limit:
        kept[:] = False
        order = np.argsort(place, kind="stable")
        num_worst = int(limit * WORST_SHARE)
        kept[order[: limit - num_worst]] = True
        rest = order[limit - num_worst :]
        rest = rest[np.argsort(np.where(np.isnan(reward), -np.inf, reward)[rest], kind="stable")]
        kept[rest[reward[rest] < WORST_BELOW][:num_worst]] = True
        kept[order[~kept[order]][: limit - int(kept.sum())]] = True
    return kept, len(kept)


def _place(problem: str) -> int:
    digest = blake2b(problem.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
