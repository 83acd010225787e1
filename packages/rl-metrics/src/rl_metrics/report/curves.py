"""Curves of a run's metrics by chapter, with healthy bands; long curves are thinned."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_metrics.definitions.table import CHAPTERS, DEFINITIONS, chapter_of
from rl_metrics.report.packing import Kind
from rl_metrics.run_files.history import History

MAX_POINTS = 4000
"""Maximum number of points of a curve; a longer one is reduced to the extremes of half as many ranges of steps."""

Columns = dict[str, tuple[Kind, NDArray[Any]]]


def pack_curves(history: History) -> tuple[list[dict[str, Any]], Columns]:
    """Return a description of each metric, by chapter, and its columns: steps `x{i}` and values `y{i}`.

    Metrics without a finite value are in `never_finite` instead.
    """
    described: list[dict[str, Any]] = []
    columns: Columns = {}
    for name in sorted(history.values, key=lambda name: CHAPTERS.index(chapter_of(name))):
        steps, values = _known(history, name)
        if not len(steps):
            continue
        steps, values, is_thinned = thin(steps, values)
        described.append({"name": name, "chapter": chapter_of(name), "is_thinned": is_thinned, **meaning_of(name)})
        number = len(described) - 1
        columns[f"x{number}"] = ("i32", steps)
        columns[f"y{number}"] = ("f32", values)
    return described, columns


def never_finite(history: History) -> list[dict[str, Any]]:
    """Return a description of each metric that never had a finite value."""
    return [
        {"name": name, "chapter": chapter_of(name), "is_thinned": False, **meaning_of(name)}
        for name in history.values
        if not len(_known(history, name)[0])
    ]


def thin(steps: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], bool]:
    """Return at most `MAX_POINTS` steps and values, keeping peaks, and whether any were dropped."""
    if len(steps) <= MAX_POINTS:
        return steps, values, False
    edges = np.linspace(0, len(steps), MAX_POINTS // 2 + 1).astype(int)
    kept = np.unique([_extremes(values, first, last) for first, last in pairwise(edges.tolist())])
    return steps[kept], values[kept], True


def _extremes(values: NDArray[Any], first: int, last: int) -> list[int]:
    part = values[first:last]
    return [first + int(part.argmin()), first + int(part.argmax())]


def _known(history: History, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    values = history.values[name]
    is_known = np.isfinite(values)
    return history.steps[is_known], values[is_known]


def meaning_of(name: str) -> dict[str, Any]:
    """Return a metric's unit, meaning and healthy range from the table; empty if it is undefined."""
    definition = DEFINITIONS.find(name)
    if definition is None:
        return {"unit": "", "meaning": "", "band": None}
    band = definition.healthy
    return {
        "unit": "" if definition.unit == "1" else definition.unit,
        "meaning": definition.meaning,
        "band": None if band is None else {"low": band.low, "high": band.high, "text": f"{band} ({band.source})"},
    }
