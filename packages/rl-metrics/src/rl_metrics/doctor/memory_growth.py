"""Diagnosis of memory growth by owner, from metrics and from memory by line of code."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rl_metrics.comparison.intervals import mann_kendall_z, theil_sen
from rl_metrics.doctor.diagnosis import Cause, Diagnosis, NoFinding
from rl_metrics.doctor.token_pairs import Floats, Ints
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.history import History

OWNER = re.compile(r"memory/(.+)_gb")
WHOLE = ("perf/process_memory_gb", "perf/cpu_memory_used_gb")
"""Totals of the owners; the first one that grows is explained by them."""

TOTAL = "perf/cpu_memory_total_gb"
QUEUE = "queue/size_bytes"
BYTES_PER_GIB = float(1 << 30)
BYTES_PER_MIB = 2**20
MOST_POINTS = 300
"""Maximum number of points for slopes, which gives 45,000 pairs."""
MOST_NAMED = 5
MAX_LINE = 100

WARM_UP = 0.2
"""Share of the steps to skip, while caches, pools and compiled code fill up."""

WARM_UP_STEPS = 30
"""Minimum number of steps to skip."""

MIN_POINTS = 8
"""Minimum number of measurements after the warm-up; with eight, a trend by chance has probability 1 in 1,000."""

CERTAIN = 3.0
"""Standard deviations of the Mann-Kendall statistic that rule out chance."""

LEAST_GB = 0.02
"""Minimum growth over the judged steps, in GiB."""

LEAST_SHARE = 0.1
"""Minimum growth as a share of the owner's memory at the start, because heaps vary by a few percent."""

LEAST_LATE = 0.3
"""Minimum ratio of the second half's slope to the whole slope; a cache that fills up slows down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The trend of a series.

    Attributes:
        slope: Median slope of all pairs, in GiB per step (Theil-Sen).
        z: Significance of the rise, in standard deviations (Mann-Kendall).
        late: Slope of the second half, in GiB per step.
        start: Median of the first fifth, in GiB.
        grown: Slope times the number of judged steps, in GiB.
        first: First judged step.
        last: Last judged step.
        end: Newest value, in GiB.
    """

    slope: float
    z: float
    late: float
    start: float
    grown: float
    first: int
    last: int
    end: float


def trend_of(steps: Ints, values: Floats) -> Trend | None:
    """Return the trend of a series after its warm-up, or None with too few points.

    Args:
        steps: [S] increasing steps.
        values: [S] values in GiB; NaN if a step has none.
    """
    finite = np.isfinite(values)
    x, y = steps[finite].astype(np.float64), values[finite]
    if len(x):
        is_late = x >= x[0] + max(WARM_UP * (x[-1] - x[0]), WARM_UP_STEPS)
        x, y = x[is_late], y[is_late]
    if len(x) < MIN_POINTS:
        return None
    if len(x) > MOST_POINTS:
        chosen = np.linspace(0, len(x) - 1, MOST_POINTS).astype(np.int64)
        x, y = x[chosen], y[chosen]
    half = len(x) // 2
    slope = theil_sen(x, y)
    return Trend(
        slope=slope,
        z=mann_kendall_z(y),
        late=theil_sen(x[half:], y[half:]),
        start=float(np.median(y[: max(len(y) // 5, 1)])),
        grown=slope * float(x[-1] - x[0]),
        first=int(x[0]),
        last=int(x[-1]),
        end=float(y[-1]),
    )


def is_growing(trend: Trend | None) -> bool:
    """Return whether a trend is significant, large enough and does not level off."""
    if trend is None or trend.z < CERTAIN or trend.slope <= 0.0:
        return False
    is_large = trend.grown >= LEAST_GB and trend.grown >= LEAST_SHARE * max(trend.start, 0.0)
    return is_large and trend.late >= LEAST_LATE * trend.slope


def diagnose_memory(history: History, events: Sequence[Mapping[str, Any]]) -> Diagnosis | NoFinding:
    """Diagnose memory growth from metrics and events."""
    columns = {name: column for name in history.values if _is_owner(name) and (column := history.get(name)) is not None}
    columns |= {name: column for name in WHOLE if (column := history.get(name)) is not None}
    if QUEUE in history.values and "memory/queue_gb" not in columns:
        columns["memory/queue_gb"] = history.values[QUEUE] / BYTES_PER_GIB
    trends = {name: trend_of(history.steps, column) for name, column in columns.items()}
    known = {name: trend for name, trend in trends.items() if trend is not None}
    if not known:
        text = f"no memory was measured at {MIN_POINTS} steps or more: memory/*, {WHOLE[0]}"
        return NoFinding(kind="memory", state="unknown", text=text)
    growing = {name: trend for name, trend in known.items() if is_growing(trend)}
    if set(growing) == {WHOLE[1]} and any(map(_is_owner, columns)):
        text = (
            f"the run's memory is steady; {WHOLE[1]} grew by {growing[WHOLE[1]].grown:.2g} GiB since step "
            f"{growing[WHOLE[1]].first}, because of another program"
        )
        return NoFinding(kind="memory", state="right", text=text)
    if not growing:
        largest = max(known, key=lambda name: known[name].grown)
        text = (
            f"memory is steady: {largest} changed by {known[largest].grown:+.2g} GiB since step {known[largest].first}"
        )
        return NoFinding(kind="memory", state="right", text=text)
    owners = sorted((name for name in growing if _is_owner(name)), key=lambda name: (-growing[name].slope, name))
    whole = next((name for name in WHOLE if name in growing), None)
    causes = _owner_causes(
        owners,
        growing,
        whole,
        lambda owner: (*_of_python(owner, history), *_growing_lines(owner, events)),
    )
    if not causes:
        causes = (_unknown_owner(str(whole), growing[str(whole)], events),)
    evidence = [_evidence(name, growing[name]) for name in WHOLE if name in growing]
    evidence += _until_full(history, known, growing)
    return Diagnosis(kind="memory", what="Memory grows from step to step.", evidence=tuple(evidence), causes=causes)


def _is_owner(name: str) -> bool:
    return OWNER.fullmatch(name) is not None


def _evidence(name: str, trend: Trend) -> Evidence:
    text = (
        f"{name} grows by {trend.slope:.3g} GiB per step: {trend.grown:.3g} GiB in steps {trend.first} to "
        f"{trend.last}, from {trend.start:.3g} to {trend.end:.3g}"
    )
    return Evidence(metric=name, text=text, value=trend.slope)


def _owner_causes(
    owners: Sequence[str], trends: Mapping[str, Trend], whole: str | None, inside: Callable[[str], tuple[Evidence, ...]]
) -> tuple[Cause, ...]:
    """Return owners by growth; the queue comes before a process whose growth it mostly explains."""
    total = trends[whole].slope if whole is not None else max((trends[name].slope for name in owners), default=0.0)
    processes = [name for name in owners if name != "memory/queue_gb"]
    queue = trends.get("memory/queue_gb")
    explains = queue is not None and any(queue.slope >= 0.5 * trends[name].slope for name in processes)
    first = ["memory/queue_gb"] if explains else []
    causes = []
    for metric in [*first, *(name for name in owners if name not in first)][:MOST_NAMED]:
        matched = OWNER.fullmatch(metric)
        owner = matched.group(1) if matched else metric
        advice = _advice(owner)
        share = min(trends[metric].slope / total, 1.0) if total > 0.0 else None
        evidence = (_evidence(metric, trends[metric]), *inside(owner))
        cause = Cause(name=owner, title=f"memory of {owner}", share=share, evidence=evidence, advice=advice)
        causes.append(cause)
    return tuple(causes)


def _advice(owner: str) -> tuple[str, ...]:
    if owner == "queue":
        return ("find out what stays in the queue: queue/rows, and which tasks hold leases", "bound the queue")
    if owner.endswith("_children"):
        return (f"look at the processes started by {owner.removesuffix('_children')}: reward workers, tools, engines",)
    return (
        f"look for objects that {owner} keeps from every step: growing lists, unbounded caches, tensors with their "
        "graph",
        "set metrics.trace_memory for some steps: this report then names the lines of code whose objects grow",
    )


def _unknown_owner(whole: str, trend: Trend, events: Sequence[Mapping[str, Any]]) -> Cause:
    roles = sorted({str(event.get("role")) for event in events if event.get("event") == "memory_lines"})
    lines = tuple(evidence for role in roles for evidence in _growing_lines(role, events))
    what = "the host's memory grows, but no process of the run" if whole == WHOLE[1] else "the trainer's process grows"
    return Cause(
        name="process" if whole == WHOLE[0] else "host",
        title=f"{what}; no owner within it is known",
        share=1.0,
        evidence=(_evidence(whole, trend), *lines),
        advice=_advice("the process"),
    )


def _of_python(owner: str, history: History) -> tuple[Evidence, ...]:
    """Return whether Python objects or native code hold the growing memory, if Python's blocks were counted."""
    name = f"memory/{owner}_python_blocks"
    column = history.get(name)
    trend = None if column is None else trend_of(history.steps, column)
    if trend is None:
        return ()
    if trend.z >= CERTAIN and trend.grown > 0.0:
        text = f"Python's blocks grow by {trend.slope:,.0f} per step: Python objects accumulate"
    else:
        text = f"Python's blocks stay at {trend.end:,.0f}: native code or large arrays hold the growing memory"
    return (Evidence(metric=name, text=text, value=trend.slope),)


def _growing_lines(owner: str, events: Sequence[Mapping[str, Any]]) -> tuple[Evidence, ...]:
    """Return lines of code whose objects grow with every snapshot, largest growth first."""
    sizes: dict[str, list[int]] = {}
    num_snapshots = 0
    for event in events:
        lines = event.get("lines")
        if event.get("event") != "memory_lines" or event.get("role") != owner or not isinstance(lines, list):
            continue
        num_snapshots += 1
        for one in lines:
            line, size = (one.get("line"), one.get("size_bytes")) if isinstance(one, dict) else (None, None)
            if isinstance(line, str) and isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 60:
                sizes.setdefault(line, []).append(size)
    grown = {
        line: row
        for line, row in sizes.items()
        if num_snapshots >= 3 and len(row) >= 3 and all(one < other for one, other in pairwise(row))
    }
    largest = sorted(grown, key=lambda line: (grown[line][0] - grown[line][-1], line))[:MOST_NAMED]
    return tuple(
        Evidence(
            metric="memory_lines",
            text=f"{line[-MAX_LINE:]}: {grown[line][0] / BYTES_PER_MIB:,.1f} MiB, then "
            f"{grown[line][-1] / BYTES_PER_MIB:,.1f}, more in each of {len(grown[line])} snapshots",
            value=float(grown[line][-1] - grown[line][0]),
        )
        for line in largest
    )


def _until_full(history: History, known: Mapping[str, Trend], growing: Mapping[str, Trend]) -> list[Evidence]:
    """Return the number of steps until the host's memory is full, as evidence."""
    column, used = history.get(TOTAL), known.get(WHOLE[1])
    finite = column[np.isfinite(column)] if column is not None else np.zeros(0)
    if not len(finite) or used is None:
        return []
    slope = max([trend.slope for name, trend in growing.items()])
    left = float(finite[-1]) - used.end
    steps = left / slope
    if not math.isfinite(steps) or steps < 0.0 or steps > 1e9:
        return []
    text = f"{left:.3g} of the host's {float(finite[-1]):.3g} GiB are free: full in about {steps:,.0f} steps"
    return [Evidence(metric=TOTAL, text=text, value=steps)]
