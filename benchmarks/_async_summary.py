"""Arithmetic of benchmarks/async.py: rows, ratios, verdicts. Pure functions on plain numbers."""

from collections.abc import Sequence
from statistics import median
from typing import Any

SPEED, IDLE, BOUND = "speed", "idle_learner", "share_of_bound"
WANTED = {SPEED: 2.5, IDLE: 0.05, BOUND: 0.9}
"""Minimum speed of async over sync, maximum idle share of its learner, minimum share of the bound."""
MEDIANS = ("wall_s", "step_s", "idle_learner", "slept_learner", "idle_engine", "slots_used", "staleness_mean")


def round_row(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run's numbers with its seconds per step."""
    return {**run, "step_s": run["wall_s"] / run["steps"]}


def mode_row(mode: str, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a mode's result, the medians of its rounds.

    Args:
        mode: "sync" or "async".
        rounds: Results of `round_row`.
    """
    middle = {name: round(median(one[name] for one in rounds), 4) for name in MEDIANS}
    kept = [{name: _rounded(value) for name, value in one.items() if name != "mode"} for one in rounds]
    return {"mode": mode, **middle, "steps": rounds[0]["steps"], "rounds": kept}


def verdicts(sync: Sequence[dict[str, Any]], asynchronous: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the medians of the rounds with the targets.

    Args:
        sync: Results of `round_row`.
        asynchronous: The run that followed each.
    """
    found = {
        SPEED: [mine["step_s"] / other["step_s"] for mine, other in zip(sync, asynchronous, strict=True)],
        IDLE: [one["idle_learner"] for one in asynchronous],
        BOUND: [one["bound_s"] / one["wall_s"] for one in asynchronous],
    }
    return [
        {
            "what": what,
            "found": round(median(values), 4),
            "of_rounds": [round(value, 4) for value in values],
            "wanted": WANTED[what],
            "is_met": median(values) <= WANTED[what] if what == IDLE else median(values) >= WANTED[what],
        }
        for what, values in found.items()
    ]


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
