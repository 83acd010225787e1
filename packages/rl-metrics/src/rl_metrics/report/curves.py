"""Curves of a run's metrics by chapter, with healthy bands; long curves are thinned."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_metrics.definitions.table import CHAPTERS, DEFINITIONS, chapter_of
from rl_metrics.report.packing import Kind
from rl_metrics.run_files.history import History

MAX_POINTS = 4000
"""Of a curve. A longer one shows the lowest and the highest value of each of half as many stretches of steps."""

Columns = dict[str, tuple[Kind, NDArray[Any]]]


def pack_curves(history: History) -> tuple[list[dict[str, Any]], Columns]:
    """What is known of each metric, by chapter, and its columns: `x{i}` are steps, `y{i}` values.

    A metric without any finite value is left out: `never_finite` has those.
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
    """What is known of each metric that was written, but never as a finite number."""
    return [
        {"name": name, "chapter": chapter_of(name), "is_thinned": False, **meaning_of(name)}
        for name in history.values
        if not len(_known(history, name)[0])
    ]


def thin(steps: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], bool]:
    """Steps and values, at most `MAX_POINTS`, and whether any were left out; no peak is lost."""
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
    """Unit, meaning and healthy band of a metric, as the table has them; empty where it is not defined."""
    definition = DEFINITIONS.find(name)
    if definition is None:
        return {"unit": "", "meaning": "", "band": None}
    band = definition.healthy
    return {
        "unit": "" if definition.unit == "1" else definition.unit,
        "meaning": definition.meaning,
        "band": None if band is None else {"low": band.low, "high": band.high, "text": f"{band} ({band.source})"},
    }
