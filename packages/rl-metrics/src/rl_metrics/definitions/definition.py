"""Metric definitions and their lookup by name."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

import structlog

from rl_core.errors import DataError
from rl_core.record_fields import record

Reduction = Literal["mean", "sum", "min", "max", "last", "histogram"]
"""How values recorded in one step are combined: "mean" is weighted, "last" is the newest, "histogram" keeps all."""

WeightedBy = Literal["token", "trajectory", "session", "group", "prompt", "step"]
"""Unit that a mean or histogram counts; a value's weight is its number of these units."""

PLACEHOLDERS = {"source": r".+", "metric": r".+", "component": r".+", "n": r"[0-9]+"}
"""Patterns of these placeholders in a name; any other matches one part without a slash."""

log = structlog.get_logger(__name__)


@record
class Band:
    """A range of healthy values, ends included.

    Attributes:
        low: Lowest healthy value; None has no lower end.
        high: Highest healthy value; None has no upper end.
        source: Source of the range.
    """

    low: float | None = None
    high: float | None = None
    source: str

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}" if self.low != self.high else f"{self.low:g}"
        return f"at least {self.low:g}" if self.low is not None else f"at most {self.high:g}"

    def contains(self, value: float) -> bool:
        """Return True if the value is healthy; NaN never is."""
        if math.isnan(value):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@record
class Metric:
    """The definition of one metric, or of a family of them.

    Attributes:
        name: Name such as "actor/entropy"; a family has placeholders, as in "val-core/{source}/{variable}/mean@{n}".
        unit: Unit such as "nats", "s" or "tokens"; "1" for ratios, losses and other plain numbers.
        reduction: How to combine values of one step over micro-batches and ranks.
        meaning: Meaning in one sentence.
        weighted_by: Unit that a mean or histogram counts.
        healthy: The healthy range; None if the value alone is not informative.
    """

    name: str
    unit: str
    reduction: Reduction
    meaning: str
    weighted_by: WeightedBy = "step"
    healthy: Band | None = None

    @property
    def is_family(self) -> bool:
        """True if the name has placeholders."""
        return "{" in self.name

    @property
    def counts(self) -> WeightedBy | None:
        """Unit that the reduction counts; None if it counts nothing."""
        return self.weighted_by if self.reduction in ("mean", "histogram") else None

    @property
    def reduced(self) -> str:
        """The reduction in words, such as "mean over tokens"."""
        counted = "trajectories" if self.counts == "trajectory" else f"{self.counts}s"
        return f"{self.reduction} over {counted}" if self.counts else self.reduction


class MetricTable:
    """Metrics by name; a plain name has priority over families, and earlier families over later ones."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Create a table of these metrics.

        Raises:
            DataError: Two metrics have the same name.
        """
        self._metrics = tuple(metrics)
        self._plain: dict[str, Metric] = {}
        self._families: list[tuple[re.Pattern[str], Metric]] = []
        self._found: dict[str, Metric | None] = {}
        self._warned: set[str] = set()
        names: set[str] = set()
        for metric in self._metrics:
            if metric.name in names:
                raise DataError(f"metric {metric.name!r} is defined twice; remove one of the definitions.")
            names.add(metric.name)
            if metric.is_family:
                self._families.append((_family_pattern(metric.name), metric))
            else:
                self._plain[metric.name] = metric

    def __repr__(self) -> str:
        return f"MetricTable({len(self)} metrics)"

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def extended(self, metrics: Iterable[Metric]) -> "MetricTable":
        """Return this table extended with more metrics, such as those of a custom objective."""
        return MetricTable((*self._metrics, *metrics))

    def find(self, name: str) -> Metric | None:
        """Return the definition of a recorded name, with a family's placeholders filled in; None if undefined."""
        if name not in self._found:
            self._found[name] = self._search(name)
        return self._found[name]

    def lookup(self, name: str) -> Metric:
        """Return the definition of a name.

        Raises:
            DataError: The name is undefined; the message suggests the nearest one.
        """
        metric = self.find(name)
        if metric is None:
            raise DataError(
                f"metric {name!r} is not defined{self._hint(name)}. Define it in rl_metrics/definitions/table.py, "
                "or pass a table from MetricTable.extended([Metric(...)])."
            )
        return metric

    def resolve(self, name: str, *, strict: bool) -> Metric:
        """Return the definition of a name; if undefined, raise when strict, else warn once and use a plain mean.

        Raises:
            DataError: The name is undefined and `strict` is True.
        """
        if strict:
            return self.lookup(name)
        metric = self.find(name)
        if metric is not None:
            return metric
        if name not in self._warned:
            self._warned.add(name)
            log.warning("undefined_metric", metric=name, hint=self._hint(name).removeprefix("; ") or None)
        return Metric(name=name, unit="?", reduction="mean", meaning="Undefined.")

    def _search(self, name: str) -> Metric | None:
        if name in self._plain:
            return self._plain[name]
        for pattern, metric in self._families:
            if pattern.fullmatch(name):
                return replace(metric, name=name)
        return None

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, [metric.name for metric in self._metrics], n=1)
        return f"; the nearest is {near[0]!r}" if near else ""


def _family_pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{([a-z_]+)\}", name)
    literal, placeholders = parts[::2], parts[1::2]
    pattern = re.escape(literal[0])
    for placeholder, following in zip(placeholders, literal[1:], strict=True):
        pattern += f"(?:{PLACEHOLDERS.get(placeholder, '[^/]+')})" + re.escape(following)
    return re.compile(pattern)
