"""Parts of a run's report other than trajectories and validation samples."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError
from rl_metrics.definitions.table import CHAPTERS, DEFINITIONS, chapter_of
from rl_metrics.doctor.hang import has_continued, innermost_frames
from rl_metrics.health import Verdict
from rl_metrics.health.judging import judge_run
from rl_metrics.health.rules import family_of
from rl_metrics.health.stability import stability
from rl_metrics.report.packing import Kind
from rl_metrics.run_files.history import History
from rl_metrics.run_files.json_lines import number_or_none
from rl_metrics.run_files.run_record import ProbeRow, RunRecord

MAX_POINTS = 4000
"""Maximum number of points of a curve; a longer one is reduced to the extremes of half as many ranges of steps."""

Columns = dict[str, tuple[Kind, NDArray[Any]]]

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Quantiles shown of each step's distribution."""

MAX_SLOWEST = 200
MAX_EVENTS = 500
"""Maximum number of events; the newest are kept."""

MAX_PROBED = 200
"""Maximum number of probed tokens."""

MAX_CANDIDATES = 8
"""Maximum number of candidates of a probed token, most likely over all steps."""


def pack_curves(history: History) -> tuple[list[dict[str, Any]], Columns]:
    """Return a description of each metric, by chapter, and its columns: steps `x{i}` and values `y{i}`.

    Metrics that never had a finite value come last, and have no columns.
    """
    described: list[dict[str, Any]] = []
    without: list[dict[str, Any]] = []
    columns: Columns = {}
    for name in sorted(history.values, key=lambda name: CHAPTERS.index(chapter_of(name))):
        values = history.values[name]
        is_known = np.isfinite(values)
        steps, values, is_thinned = thin(history.steps[is_known], values[is_known])
        metric = {"name": name, "chapter": chapter_of(name), "is_thinned": is_thinned, **meaning_of(name)}
        if not len(steps):
            without.append(metric)
            continue
        columns[f"x{len(described)}"] = ("i32", steps)
        columns[f"y{len(described)}"] = ("f32", values)
        described.append(metric)
    return [*described, *without], columns


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


def read_verdict(run: RunRecord) -> Verdict:
    """Return the verdict that the run recorded for its newest step, with its own rules, or else judge it now.

    A recorded verdict of another step is outdated, or belongs to steps undone by a resume from an older checkpoint.
    """
    with suppress(DataError):
        written = Verdict.from_json(run.health)
        if not len(run.history.steps) or written.step == run.history.steps[-1]:
            return written
    return judge_run(run)


def describe_health(run: RunRecord) -> dict[str, Any]:
    """Return the verdict and the table of stability as JSON values."""
    verdict = read_verdict(run)
    rows = stability(run.history, verdict, family=family_of(run.history.values, run.settings))
    return {"verdict": verdict.to_json(), "stability": [row.to_json() for row in rows]}


def pack_distributions(run: RunRecord) -> tuple[list[dict[str, Any]], Columns]:
    """Return names of distributions and their columns: steps `dx{i}`, and `d{i}q{j}` for entry j of `QUANTILES`."""
    by_name: dict[str, list[tuple[int, list[float]]]] = {}
    for row in run.histograms:
        for name, histogram in row.histograms.items():
            by_name.setdefault(name, []).append((row.step, [histogram.quantile(q) for q in QUANTILES]))
    described: list[dict[str, Any]] = []
    columns: Columns = {}
    for name, rows in by_name.items():
        steps, values = np.array([step for step, _ in rows]), np.array([quantiles for _, quantiles in rows])
        kept, _, _ = thin(np.arange(len(steps)), values[:, QUANTILES.index(0.5)])
        columns[f"dx{len(described)}"] = ("i32", steps[kept])
        for number in range(len(QUANTILES)):
            columns[f"d{len(described)}q{number}"] = ("f32", values[kept, number])
        described.append({"name": name, "quantiles": list(QUANTILES), **meaning_of(name)})
    return described, columns


def slowest_sessions(run: RunRecord) -> list[dict[str, Any]]:
    """Return the slowest session of each step, slowest first: fields of its event, its step and `total_s`."""
    history = run.history
    found: list[dict[str, Any]] = []
    for event in run.events:
        if event.get("event") != "slowest_session":
            continue
        parts = {
            name: value for name in ("generate_s", "tools_s", "reward_s") if (value := number_or_none(event.get(name)))
        }
        place = int(np.searchsorted(history.times, event["time"]))
        step = event.get("step", int(history.steps[place]) if place < len(history.steps) else None)
        known = {name: event[name] for name in SESSION_FIELDS if name in event}
        found.append({**known, **parts, "step": step, "total_s": math.fsum(parts.values())})
    return sorted(found, key=lambda session: session["total_s"], reverse=True)[:MAX_SLOWEST]


SESSION_PLACE = ("prompt_uid", "session_index", "output_index")
"""Fields that identify a session."""

SESSION_FIELDS = (*SESSION_PLACE, "prompt_tokens", "response_tokens", "preemptions")

QUIET_EVENTS = ("slowest_session", "checkpoint_saved", "skip_hit", "skip_miss", "skip_stored", "memory_lines")
"""Events of every step, or shown elsewhere."""


def notable_events(run: RunRecord) -> list[dict[str, Any]]:
    """Return the newest events except those of every step: time, name, level, and the other fields as text."""
    notable = [event for event in run.events if event.get("event") not in QUIET_EVENTS][-MAX_EVENTS:]
    return [
        {
            "time": number_or_none(event.get("time")),
            "event": str(event.get("event")),
            "level": str(event.get("level", "")),
            "text": ", ".join(f"{name}: {_short(value)}" for name, value in event.items() if name not in SHOWN),
        }
        for event in notable
    ]


SHOWN = ("time", "event", "level", "evidence", "causes", "advice")
"""Fields with their own columns, or shown in the checklist."""


def pack_probes(rows: Sequence[ProbeRow]) -> tuple[list[dict[str, Any]], Columns]:
    """Return probed tokens and their columns: steps `px{i}`, and logprobs `p{i}c{j}` of candidate j or NaN."""
    asked: dict[tuple[str, int], list[ProbeRow]] = {}
    for row in rows:
        asked.setdefault((row.probe, row.position), []).append(row)
    described: list[dict[str, Any]] = []
    columns: Columns = {}
    for number, of_token in enumerate(list(asked.values())[:MAX_PROBED]):
        newest = of_token[-1]
        candidates = _candidates(of_token)
        by_row = [{newest.token: row.logprob, **dict(row.candidates)} for row in of_token]
        columns[f"px{number}"] = ("i32", np.array([row.step for row in of_token]))
        for index, text in enumerate(candidates):
            logprobs = np.array([known.get(text, math.nan) for known in by_row])
            columns[f"p{number}c{index}"] = ("f32", logprobs)
        shown = {name: getattr(newest, name) for name in ("probe", "position", "prompt", "response", "token")}
        described.append({**shown, "candidates": candidates})
    return described, columns


def _candidates(rows: Iterable[ProbeRow]) -> list[str]:
    """Return the probed token, then the others by their highest probability at any step."""
    highest: dict[str, float] = {}
    token = ""
    for row in rows:
        token = row.token
        for text, logprob in row.candidates:
            if math.isfinite(logprob):
                highest[text] = max(highest.get(text, -math.inf), logprob)
    others = sorted((text for text in highest if text != token), key=lambda text: -highest[text])
    return [token, *others[: MAX_CANDIDATES - 1]]


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return settings as pairs of a name, such as "rollout.group_size", and text."""
    found: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += flat_settings(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", _short(value)))
    return found


def describe_hang(run: RunRecord) -> dict[str, Any] | None:
    """Return the contents of hang.json, or None without one; counts are pairs, in order.

    `is_over` is whether the run continued after it.
    """
    report = run.hang
    if report is None:
        return None
    described: dict[str, Any] = msgspec.to_builtins(report)
    for role in described["roles"]:
        role |= {"counts": list(role["counts"].items()), "where": innermost_frames(role["stack"])}
    return described | {"summary": report.summary, "queue": list(report.queue.items()), "is_over": has_continued(run)}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 500 else text[:499] + "…"
