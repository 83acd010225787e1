"""Metrics of agent sessions from the gateway's counts."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rl_metrics.definitions.gateway import EVENTS
from rl_metrics.reductions.rollouts import spread

TOKENS = ("sampled_tokens", "untrained_tokens", "abandoned_tokens")
ROOTS = "roots_"
OVERHEADS = "overhead_ms"


def summarize_gateway(sessions: Iterable[Any]) -> dict[str, float]:
    """Return `gateway/*` of a step's sessions.

    Args:
        sessions: The gateway's report of each session: counts by name, and "overhead_ms" with one number per turn.
            Values that are not mappings, from sessions without a gateway, are ignored.

    Returns:
        Metrics by name; empty without a session.
    """
    told = [one for one in sessions if isinstance(one, Mapping)]
    if not told:
        return {}
    counts: Counter[str] = Counter()
    for one in told:
        counts.update({name: value for name, value in one.items() if _is_number(value)})
    roots = {name.removeprefix(ROOTS): value for name, value in counts.items() if name.startswith(ROOTS)}
    turns = [value for one in told if _is_number(value := one.get("turns"))]
    metrics = {
        **spread("gateway/turns", np.array(turns, dtype=np.float64)),
        "gateway/forks": counts["forks"] / len(told),
        "gateway/roots": sum(roots.values()) / len(told),
        **{f"gateway/roots/{reason}": float(number) for reason, number in sorted(roots.items())},
        **{f"gateway/{name}": float(counts[name]) for name in (*TOKENS, *EVENTS)},
    }
    if counts["turns"]:
        metrics["gateway/new_root_share"] = (sum(roots.values()) - roots.get("first", 0)) / counts["turns"]
    took = [one[OVERHEADS] for one in told if isinstance(one.get(OVERHEADS), list)]
    overheads = [value for values in took for value in values if _is_number(value)]
    for name, quantile in (("p50", 0.5), ("p99", 0.99)) if overheads else ():
        metrics[f"gateway/overhead_ms/{name}"] = float(np.quantile(overheads, quantile))
    return metrics


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
