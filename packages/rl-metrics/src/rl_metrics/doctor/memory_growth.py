"""Diagnosis of memory growth by owner, from metrics and from memory by line of code."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rl_metrics.comparison.intervals import mann_kendall_z, theil_sen
from rl_metrics.doctor.diagnosis import Cause, Diagnosis, NoFinding
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.history import FloatColumn, History, IntColumn

OWNER = re.compile(r"memory/(.+)_gb")
PROCESS, HOST = "perf/process_memory_gb", "perf/cpu_memory_used_gb"
"""Totals of the owners; the first one that grows is explained by them."""

QUEUE = "memory/queue_gb"
HOST_TOTAL = "perf/cpu_memory_total_gb"
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
        late: Slope of the second half, in GiB per step.
        is_certain: Whether the rise is beyond chance (Mann-Kendall).
        start: Median of the first fifth, in GiB.
        grown: Slope times the number of judged steps, in GiB.
        first: First judged step.
        last: Last judged step.
        end: Newest value, in GiB.
    """

    slope: float
    late: float
    is_certain: bool
    start: float
    grown: float
    first: int
    last: int
    end: float

    @property
    def is_growing(self) -> bool:
        """Whether the rise is significant, large enough and does not level off."""
        is_large = self.grown >= max(LEAST_GB, LEAST_SHARE * self.start)
        return self.is_certain and is_large and self.late >= LEAST_LATE * self.slope


def trend_of(steps: IntColumn, values: FloatColumn) -> Trend | None:
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
        late=theil_sen(x[half:], y[half:]),
        is_certain=mann_kendall_z(y) >= CERTAIN,
        start=float(np.median(y[: max(len(y) // 5, 1)])),
        grown=slope * float(x[-1] - x[0]),
        first=int(x[0]),
        last=int(x[-1]),
        end=float(y[-1]),
    )


def diagnose_memory(history: History, events: Sequence[Mapping[str, Any]]) -> Diagnosis | NoFinding:
    """Diagnose memory growth from metrics and events."""
    names = (*filter(OWNER.fullmatch, history.values), *(name for name in (PROCESS, HOST) if name in history.values))
    columns = {name: history.values[name] for name in names}
    if "queue/size_bytes" in history.values:
        columns.setdefault(QUEUE, history.values["queue/size_bytes"] / BYTES_PER_GIB)
    trends = {name: trend for name in columns if (trend := trend_of(history.steps, columns[name])) is not None}
    if not trends:
        text = f"no memory was measured at {MIN_POINTS} steps or more: memory/*, {PROCESS}"
        return NoFinding(kind="memory", state="unknown", text=text)
    growing = {name: trend for name, trend in trends.items() if trend.is_growing}
    owners = [name for name in growing if OWNER.fullmatch(name)]
    if not growing or (set(growing) == {HOST} and any(map(OWNER.fullmatch, columns))):
        name = max(growing or trends, key=lambda name: trends[name].grown)
        grown, first = trends[name].grown, trends[name].first
        text = f"memory is steady: {name} changed by {grown:+.2g} GiB since step {first}"
        if growing:
            since = f"{grown:.2g} GiB since step {first}, because of another program"
            text = f"the run's memory is steady; {name} grew by {since}"
        return NoFinding(kind="memory", state="right", text=text)
    wholes = [name for name in (PROCESS, HOST) if name in growing]
    total = growing[wholes[0]].slope if wholes else max(growing[name].slope for name in owners)
    owners.sort(key=lambda name: (-growing[name].slope, name))
    if QUEUE in owners and any(growing[QUEUE].slope >= 0.5 * growing[name].slope for name in owners if name != QUEUE):
        owners.sort(key=lambda name: name != QUEUE)  # it explains most of the process that holds it
    causes = [_owner_cause(name, growing[name], total, history, events) for name in owners[:MOST_NAMED]]
    return Diagnosis(
        kind="memory",
        what="Memory grows from step to step.",
        evidence=(*(_evidence(name, growing[name]) for name in wholes), *_until_full(history, trends, growing)),
        causes=tuple(causes) or (_unknown_owner(wholes[0], growing[wholes[0]], events),),
    )


def _evidence(name: str, trend: Trend) -> Evidence:
    text = (
        f"{name} grows by {trend.slope:.3g} GiB per step: {trend.grown:.3g} GiB in steps {trend.first} to "
        f"{trend.last}, from {trend.start:.3g} to {trend.end:.3g}"
    )
    return Evidence(metric=name, text=text, value=trend.slope)


def _owner_cause(
    metric: str, trend: Trend, total: float, history: History, events: Sequence[Mapping[str, Any]]
) -> Cause:
    owner = metric.removeprefix("memory/").removesuffix("_gb")
    return Cause(
        name=owner,
        title=f"memory of {owner}",
        share=min(trend.slope / total, 1.0),
        evidence=(_evidence(metric, trend), *_python_blocks(owner, history), *_growing_lines(owner, events)),
        advice=_advice(owner),
    )


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
    roles = sorted({event["role"] for event in events if event["event"] == "memory_lines"})
    what = "the host's memory grows, but no process of the run" if whole == HOST else "the trainer's process grows"
    return Cause(
        name="host" if whole == HOST else "process",
        title=f"{what}; no owner within it is known",
        share=1.0,
        evidence=(_evidence(whole, trend), *(line for role in roles for line in _growing_lines(role, events))),
        advice=_advice("the process"),
    )


def _python_blocks(owner: str, history: History) -> tuple[Evidence, ...]:
    """Return whether Python objects or native code hold the growing memory, if Python's blocks were counted."""
    name = f"memory/{owner}_python_blocks"
    trend = trend_of(history.steps, history.values[name]) if name in history.values else None
    if trend is None:
        return ()
    text = f"Python's blocks stay at {trend.end:,.0f}: native code or large arrays hold the growing memory"
    if trend.is_certain and trend.grown > 0.0:
        text = f"Python's blocks grow by {trend.slope:,.0f} per step: Python objects accumulate"
    return (Evidence(metric=name, text=text, value=trend.slope),)


def _growing_lines(owner: str, events: Sequence[Mapping[str, Any]]) -> tuple[Evidence, ...]:
    """Return lines of code whose objects grow with every snapshot, largest growth first."""
    sizes: dict[str, list[int]] = {}
    for event in events:
        if event["event"] == "memory_lines" and event["role"] == owner:
            for entry in event["lines"]:
                sizes.setdefault(entry["line"], []).append(entry["size_bytes"])
    growing = {
        line: row[-1] - row[0]
        for line, row in sizes.items()
        if len(row) >= 3 and all(size < next_size for size, next_size in pairwise(row))
    }
    largest = sorted(growing, key=lambda line: (-growing[line], line))[:MOST_NAMED]
    return tuple(
        Evidence(
            metric="memory_lines",
            text=f"{line[-MAX_LINE:]}: {sizes[line][0] / BYTES_PER_MIB:,.1f} MiB, then "
            f"{sizes[line][-1] / BYTES_PER_MIB:,.1f}, more in each of {len(sizes[line])} snapshots",
            value=float(growing[line]),
        )
        for line in largest
    )


def _until_full(history: History, trends: Mapping[str, Trend], growing: Mapping[str, Trend]) -> list[Evidence]:
    """Return the number of steps until the host's memory is full, as evidence."""
    totals = history.finite(HOST_TOTAL)
    if not len(totals) or HOST not in trends:
        return []
    left = float(totals[-1]) - trends[HOST].end
    steps = left / max(trend.slope for trend in growing.values())
    if not 0.0 <= steps <= 1e9:
        return []
    text = f"{left:.3g} of the host's {float(totals[-1]):.3g} GiB are free: full in about {steps:,.0f} steps"
    return [Evidence(metric=HOST_TOTAL, text=text, value=steps)]
