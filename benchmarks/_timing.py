"""Closed loops with a common start; uses only the standard library."""

import time
from collections.abc import Callable

LEAD_S = 0.15
"""Time from calling the clients to their common start, so that all have received the call."""


def wait_until(starts_at: float) -> None:
    """Sleep until a time on the clock of `time.perf_counter`, which all processes of a Linux host share."""
    time.sleep(max(0.0, starts_at - time.perf_counter()))


def times_ms(act: Callable[[], object], *, num_calls: int, starts_at: float) -> list[float]:
    """Run a closed loop; return the milliseconds of each call."""
    wait_until(starts_at)
    taken = []
    for _ in range(num_calls):
        started = time.perf_counter()
        act()
        taken.append((time.perf_counter() - started) * 1_000)
    return taken
