"""A queue's statistics in Prometheus' text format; the only file that imports its library."""

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_core.data.outside_text import encodable
from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_core.queue.interface import STATES

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "rl_queue_"
NO_LABELS: Mapping[str, str] = {}


class _MetricFamily(NamedTuple):
    """A metric family: name without the prefix, help text, distinguishing label, and whether it is a counter."""

    name: str
    meaning: str
    label: str = ""
    is_counter: bool = False


SINGLE = {
    "rows": _MetricFamily("held_rows", "Rows stored in the queue."),
    "rows/leased": _MetricFamily("leased_rows", "Rows of running leases."),
    "rows/reserved": _MetricFamily("reserved_rows", "Rows being written."),
    "size_bytes": _MetricFamily("held_bytes", "Bytes of the columns stored in the queue."),
    "size_bytes/leased": _MetricFamily("leased_bytes", "Bytes of the columns of running leases."),
    "size_bytes/reserved": _MetricFamily("reserved_bytes", "Bytes of the columns being written."),
    "leases": _MetricFamily("leases", "Running leases."),
    "claims": _MetricFamily("claims", "Running claims of producers."),
    "oldest_lease_s": _MetricFamily("oldest_lease_seconds", "Age of the oldest running lease."),
    "oldest_issued_s": _MetricFamily("oldest_issued_seconds", "Age of the oldest prompt with unsettled sessions."),
    "leases_expired": _MetricFamily("leases_expired", "Leases and claims that expired.", is_counter=True),
    "reissued": _MetricFamily("prompts_reissued", "Prompts issued again.", is_counter=True),
}
BY_LABEL = {
    "groups": _MetricFamily("groups", "Groups in each state.", "state"),
    "rows": _MetricFamily("rows", "Rows of the groups in each state.", "state"),
    "size_bytes": _MetricFamily("size_bytes", "Bytes of the columns of the groups in each state.", "state"),
    "waiting": _MetricFamily("waiting", "Waiting requests: puts for capacity, leases and claims for groups.", "kind"),
    "waited_s": _MetricFamily("waited_seconds", "Total wait of answered requests.", "kind", is_counter=True),
    "acks": _MetricFamily("acks", "Groups acked by each task.", "task", is_counter=True),
    "drops": _MetricFamily("drops", "Prompts dropped, by the beginning of their reason.", "reason", is_counter=True),
}


def prometheus_text(stats: Mapping[str, float], *, labels: Mapping[str, str] = NO_LABELS) -> str:
    """Return the text that a Prometheus server scrapes.

    Args:
        stats: Statistics from `TransferQueue.stats`.
        labels: Labels on every line, such as {"queue": "rollouts"} for a process with several queues.

    Raises:
        MissingExtraError: prometheus-client is not installed.
        SettingsError: A label's name is invalid or already in use.
        DataError: A statistic is unknown.
    """
    try:
        from prometheus_client import generate_latest
    except ImportError as error:
        raise MissingExtraError("Prometheus text needs prometheus-client. Install rl-core[prometheus].") from error
    _check_labels(labels)
    families = _families(stats, {name: encodable(value) for name, value in labels.items()})
    return generate_latest(SimpleNamespace(collect=lambda: families)).decode()


def _families(stats: Mapping[str, float], labels: Mapping[str, str]) -> "list[Metric]":
    states = {f"{name}/{state}": 0.0 for name in ("groups", "rows", "size_bytes") for state in STATES}
    members: dict[_MetricFamily, list[tuple[str, float]]] = {}
    for key, value in {**states, **stats}.items():
        family, member = _family_of(key)
        members.setdefault(family, []).append((member, value))
    return [_metric(family, found, labels) for family, found in members.items()]


def _family_of(key: str) -> tuple[_MetricFamily, str]:
    stem, _, member = key.partition("/")
    family = SINGLE.get(key) or (BY_LABEL.get(stem) if member else None)
    if family is None:
        known = ", ".join([*SINGLE, *(f"{name}/..." for name in BY_LABEL)])
        raise DataError(f"unknown statistic {key!r}; known statistics: {known}.")
    return family, member


def _metric(family: _MetricFamily, members: list[tuple[str, float]], labels: Mapping[str, str]) -> "Metric":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    own = [family.label] if family.label else []
    kind: Any = CounterMetricFamily if family.is_counter else GaugeMetricFamily
    metric: Metric = kind(PREFIX + family.name, family.meaning, labels=[*labels, *own])
    for member, value in members:
        metric.add_metric([*labels.values(), *(encodable(member) for _ in own)], value)  # type: ignore[attr-defined]
    return metric


def _check_labels(labels: Mapping[str, str]) -> None:
    taken = {family.label for family in BY_LABEL.values()}
    for name in labels:
        if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name in taken:
            raise SettingsError(
                "a label name must consist of letters, digits and underscores, and must not be one of "
                f"{', '.join(sorted(taken))}; found {name!r}."
            )
