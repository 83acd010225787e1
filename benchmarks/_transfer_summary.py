"""Arithmetic of benchmarks/transfer.py: rows of results from measured times, and targets."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import ge, le, lt
from typing import Any

OPERATIONS = ("put", "get", "small_put", "small_get", "lease_10k", "lease_1m")
OURS = ("memory", "shm", "ray")
RELATIONS: Mapping[str, Callable[[float, float], bool]] = {"at least": ge, "at most": le, "below": lt}
Results = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class Measured:
    """Measurements of a system so far."""

    bulk_s: dict[str, list[float]] = field(default_factory=lambda: {"put": [], "get": []})
    """Seconds of each round, by operation."""

    call_ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS[2:]})
    """Milliseconds of each call in all rounds, by operation."""

    ack_ms: list[float] = field(default_factory=list)
    """Milliseconds of the ack after each bulk get, for systems with an ack."""

    small_ack_ms: list[float] = field(default_factory=list)
    """Milliseconds of the ack after each small get."""

    reasons: dict[str, str] = field(default_factory=dict)
    """Why an operation was not measured."""

    memory: Mapping[str, int] | None = None
    """peak_bytes and payload_bytes."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages in its environment."""

    failure: str | None = None
    """Why the system could not start or continue."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("values must have at least one; found none.")
    ordered = sorted(values)
    rank = -int(-share * len(ordered) // 1)
    return ordered[max(rank, 1) - 1]


def bulk_row(seconds: Sequence[float], *, payload_bytes: int, num_samples: int) -> dict[str, float | None]:
    """Return the speeds of the best and of the median round."""
    best, median = min(seconds), statistics.median(seconds)
    return {
        "mb_per_s": round(payload_bytes / best / 1e6, 1),
        "mb_per_s_median": round(payload_bytes / median / 1e6, 1),
        "samples_per_s": round(num_samples / best, 1),
        "p50_ms": None,
        "p99_ms": None,
    }


def call_row(times_ms: Sequence[float], *, samples_at_once: int) -> dict[str, float | None]:
    """Return percentiles of single calls.

    Args:
        times_ms: All calls.
        samples_at_once: Number of samples in flight: those of one call of each client.
    """
    return {
        "mb_per_s": None,
        "mb_per_s_median": None,
        "samples_per_s": round(samples_at_once * 1_000 / statistics.fmean(times_ms), 1),
        "p50_ms": round(percentile(times_ms, 0.5), 4),
        "p99_ms": round(percentile(times_ms, 0.99), 4),
    }


def system_rows(
    system: str, measured: Measured, *, payload_bytes: int, num_samples: int, num_clients: int, lease_rows: int
) -> list[dict[str, Any]]:
    """Return a row for each operation; missing measurements are null, with the reason."""
    rows = []
    for operation in OPERATIONS:
        row: dict[str, Any] = dict.fromkeys(("mb_per_s", "mb_per_s_median", "samples_per_s", "p50_ms", "p99_ms"))
        if seconds := measured.bulk_s.get(operation):
            row = bulk_row(seconds, payload_bytes=payload_bytes, num_samples=num_samples)
        elif times_ms := measured.call_ms.get(operation):
            at_once = lease_rows if operation.startswith("lease") else num_clients
            row = call_row(times_ms, samples_at_once=at_once)
        else:
            row["reason"] = measured.reasons.get(operation) or (measured.failure or "not asked for").splitlines()[0]
        rows.append({"system": system, "operation": operation, **row})
    for operation, times_ms, at_once in (
        ("ack", measured.ack_ms, num_samples),
        ("small_ack", measured.small_ack_ms, num_clients),
    ):
        if times_ms:
            rows.append({"system": system, "operation": operation, **call_row(times_ms, samples_at_once=at_once)})
    return rows


def targets(results: Results, *, memcpy_mb_per_s: float, memory: Mapping[str, Mapping[str, int] | None]) -> list[Any]:
    """Return each target with the result; null if something was not measured."""
    found = []
    for system, factor in (("shm", 15.0), ("ray", 4.0)):
        for operation in ("put", "get"):
            ratio = quotient(results, "mb_per_s", (system, operation), ("transferqueue", operation))
            medians = quotient(results, "mb_per_s_median", (system, operation), ("transferqueue", operation))
            claim = target(f"{system} {operation}, times TransferQueue's", "at least", factor, ratio)
            found.append({**claim, "found_of_medians": medians})
    for operation in ("put", "get"):
        speed = value(results, "mb_per_s", ("shm", operation))
        share = None if speed is None else round(speed / memcpy_mb_per_s, 3)
        found.append(target(f"shm {operation}, share of memcpy", "at least", 0.4, share))
    for operation in ("small_put", "small_get"):
        time_ms = value(results, "p50_ms", ("shm", operation))
        found.append(target(f"shm {operation}, p50 in ms", "below", 1.0, time_ms))
    for system in OURS:
        ratio = quotient(results, "p50_ms", (system, "lease_1m"), (system, "lease_10k"))
        found.append(target(f"{system} lease at 1,000,000 rows, times that at 10,000", "at most", 2.0, ratio))
    for system in OURS:
        held = memory.get(system)
        share = None if held is None else round(held["peak_bytes"] / held["payload_bytes"], 3)
        found.append(target(f"{system} peak memory, times the payload", "at most", 1.3, share))
    return found


def target(name: str, relation: str, wanted: float, found: float | None) -> dict[str, Any]:
    """Return a target, and whether it is met; null without a result."""
    is_met = None if found is None else RELATIONS[relation](found, wanted)
    return {"target": name, "relation": relation, "wanted": wanted, "found": found, "is_met": is_met}


def value(results: Results, key: str, place: tuple[str, str]) -> float | None:
    """Return a value of the row of (system, operation)."""
    for row in results:
        if (row["system"], row["operation"]) == place:
            found: float | None = row[key]
            return found
    return None


def quotient(results: Results, key: str, above: tuple[str, str], below: tuple[str, str]) -> float | None:
    """Return one row's value divided by another's; None if either was not measured."""
    high, low = value(results, key, above), value(results, key, below)
    return None if high is None or not low else round(high / low, 3)
