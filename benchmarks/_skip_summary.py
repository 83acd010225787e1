"""Arithmetic of the skip-cache benchmark: speeds, ratios of rounds, targets. Pure functions on plain numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import ge, le
from statistics import median, quantiles
from typing import Any

OURS, COMPRESSED, ROWS, PADDED, VERL = "ours", "ours_compressed", "torch_rows", "torch_padded", "verl"
OPERATIONS = ("write", "read")
RELATIONS: Mapping[str, Callable[[float, float], bool]] = {"at least": ge, "at most": le}


@dataclass(slots=True, kw_only=True)
class Measured:
    """Measurements of one system, without the first round, a warm-up.

    Attributes:
        wall_s: Seconds of each round, by operation.
        unflushed_s: Seconds of one write per round that does not wait for the disk, for a system whose writes do.
        size_bytes: Size on the disk.
        versions: Versions of the packages in its environment.
    """

    wall_s: dict[str, list[float]] = field(default_factory=lambda: {operation: [] for operation in OPERATIONS})
    unflushed_s: list[float] = field(default_factory=list)
    size_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)


Systems = Mapping[str, Measured]


def result_rows(measured: Systems, *, payload_bytes: int) -> list[dict[str, Any]]:
    """Return a row for each system and operation; speeds refer to the payload's bytes, however a system stores them."""
    return [
        {
            "system": system,
            "operation": operation,
            "mb_per_s": round(payload_bytes / median(found.wall_s[operation]) / 1e6, 1),
            "size_mb": round(found.size_bytes / 1e6, 2),
            "mb_per_s_quartiles": [
                round(payload_bytes / seconds / 1e6, 1) for seconds in reversed(quartiles(found.wall_s[operation]))
            ],
            "mb_per_s_best": round(payload_bytes / min(found.wall_s[operation]) / 1e6, 1),
            "wall_s": [round(seconds, 5) for seconds in found.wall_s[operation]],
        }
        for system, found in measured.items()
        for operation in OPERATIONS
    ]


def comparisons(measured: Systems) -> list[dict[str, Any]]:
    """Return our speed-up over each peer: median and quartiles of the rounds' ratios."""
    rows = []
    for system in (OURS, COMPRESSED):
        for peer in (ROWS, PADDED, VERL):
            for operation in OPERATIONS:
                ratios = round_ratios(measured, system, peer, operation)
                if ratios:
                    rows.append(
                        {
                            "system": system,
                            "peer": peer,
                            "operation": operation,
                            "ratio": round(median(ratios), 3),
                            "ratio_quartiles": [round(ratio, 3) for ratio in quartiles(ratios)],
                        }
                    )
    return rows


def targets(measured: Systems, *, payload_bytes: int, is_judged: bool = True) -> list[dict[str, Any]]:
    """Return each target with the result; ratios are medians over rounds. Too few samples are not judged."""
    read_mb_per_s = payload_bytes / median(measured[OURS].wall_s["read"]) / 1e6
    share = measured[COMPRESSED].size_bytes / payload_bytes
    reads, writes = (median(round_ratios(measured, OURS, ROWS, operation)) for operation in ("read", "write"))
    claims = [
        target("ours read, MB/s", "at least", 1_000.0, round(read_mb_per_s, 1)),
        target("ours read, times torch_rows'", "at least", 8.0, round(reads, 3)),
        target("ours write, times torch_rows'", "at least", 3.0, round(writes, 3)),
        target("ours_compressed, share of the payload's bytes", "at most", 0.35, round(share, 4)),
    ]
    return claims if is_judged else [{**claim, "is_met": None} for claim in claims]


def target(name: str, relation: str, wanted: float, found: float) -> dict[str, Any]:
    """Return a target, and whether it is met."""
    is_met = RELATIONS[relation](found, wanted)
    return {"target": name, "relation": relation, "wanted": wanted, "found": found, "is_met": is_met}


def flushes(measured: Systems) -> dict[str, dict[str, float]]:
    """Return how much longer writes take because they wait for the disk, from the pairs of writes in each round."""
    found = {}
    for system, of in measured.items():
        pairs = list(zip(of.wall_s["write"], of.unflushed_s, strict=False))
        if pairs:
            found[system] = {
                "flush_ms": round(median(whole - unflushed for whole, unflushed in pairs) * 1_000, 2),
                "share_of_write": round(median(1 - unflushed / whole for whole, unflushed in pairs), 3),
            }
    return found


def round_ratios(measured: Systems, system: str, peer: str, operation: str) -> list[float]:
    """Return the peer's seconds divided by the system's per round; empty if one of them was left out."""
    if system not in measured or peer not in measured:
        return []
    pairs = zip(measured[system].wall_s[operation], measured[peer].wall_s[operation], strict=True)
    return [theirs / own for own, theirs in pairs]


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and third quartile; for a single value, that value twice."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return [first, third]
