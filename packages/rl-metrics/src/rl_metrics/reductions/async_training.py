"""Metrics of the asynchronous trainer from arrays: pure functions, in float64."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_core.errors import DataError, ShapeError

Array = NDArray[Any]


def summarize_processing_times(seconds: ArrayLike) -> dict[str, float]:
    """Return `fully_async/processing_time/{avg,max,min,tp50,tp95,tp99}`.

    Args:
        seconds: [G] float, time of each group from the start of its generation until it could train.

    Returns:
        Metrics by name; empty without groups. Percentiles are interpolated linearly, as in verl.

    Raises:
        ShapeError: `seconds` is not 1-D.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if times.ndim != 1:
        raise ShapeError(f"seconds must have shape [G]; found {list(times.shape)}. Pass one number per group.")
    if not times.size:
        return {}
    tp50, tp95, tp99 = np.percentile(times, [50, 95, 99])
    values = {"avg": times.mean(), "max": times.max(), "min": times.min(), "tp50": tp50, "tp95": tp95, "tp99": tp99}
    return {f"fully_async/processing_time/{name}": float(value) for name, value in values.items()}


def summarize_staleness(
    oldest_versions: ArrayLike,
    newest_versions: ArrayLike,
    *,
    policy_version: int,
    group_index: ArrayLike | None = None,
) -> dict[str, float]:
    """Return `fully_async/staleness/*` over groups, and `fully_async/partial/*` and the stale count over trajectories.

    Args:
        oldest_versions: [N] int, oldest version of each trajectory's trained tokens.
        newest_versions: [N] int, newest version of the same tokens.
        policy_version: Version of the weights that they train.
        group_index: [N] int, group of each row; None treats each row as a group.

    Returns:
        Metrics by name; empty without rows. A trajectory is partial if its tokens have several versions. Percentiles
        are interpolated linearly.

    Raises:
        ShapeError: The arrays are not 1-D and of equal length.
        DataError: A version is not an integer, an oldest version exceeds the newest, or a newest exceeds the policy's.
    """
    oldest, newest = _versions(oldest_versions), _versions(newest_versions)
    groups = np.arange(len(oldest)) if group_index is None else np.asarray(group_index)
    if oldest.ndim != 1 or not oldest.shape == newest.shape == groups.shape:
        raise ShapeError(
            "oldest_versions, newest_versions and group_index must have the same shape [N]; found "
            f"{list(oldest.shape)}, {list(newest.shape)} and {list(groups.shape)}. Pass one per trajectory."
        )
    if not oldest.size:
        return {}
    if (oldest > newest).any() or (newest > policy_version).any():
        row = int(np.argmax((oldest > newest) | (newest > policy_version)))
        raise DataError(
            f"a trajectory's versions must be oldest <= newest <= the policy's {policy_version}; found "
            f"{oldest[row]} and {newest[row]} in row {row}. Check for swapped arguments or an old policy_version."
        )
    num_stale = float((oldest < policy_version).sum())
    return {
        **_staleness(oldest, groups, policy_version),
        **_partial(newest - oldest),
        "fully_async/count/stale_trajectory_processed": num_stale,
    }


def _staleness(oldest: Array, groups: Array, policy_version: int) -> dict[str, float]:
    _, group_of = np.unique(groups, return_inverse=True)
    staleness = np.zeros(int(group_of.max()) + 1, dtype=np.int64)
    np.maximum.at(staleness, group_of, policy_version - oldest)
    p50, p95 = np.percentile(staleness, [50, 95])
    values = {"mean": staleness.mean(), "max": staleness.max(), "p50": p50, "p95": p95}
    return {f"fully_async/staleness/{name}": float(value) for name, value in values.items()}


def _partial(spans: Array) -> dict[str, float]:
    is_partial = spans > 0
    values = {
        "total_partial_num": is_partial.sum(),
        "partial_ratio": is_partial.mean(),
        "max_partial_span": spans.max(),
        "mean_partial_span": spans[is_partial].mean() if is_partial.any() else 0.0,
    }
    return {f"fully_async/partial/{name}": float(value) for name, value in values.items()}


def _versions(versions: ArrayLike) -> Array:
    found = np.asarray(versions)
    if found.size and found.dtype.kind not in "iu":
        raise DataError(f"versions must be whole numbers; found {found.dtype}. Pass an integer array.")
    return found.astype(np.int64)
