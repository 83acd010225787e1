"""Closed loops with a common start; no library needed."""

import time
from collections.abc import Callable

LEAD_S = 0.15
"""From the call of clients to their common start, so that all have been reached by then."""


def wait_until(starts_at: float) -> None:
    """Sleep until a time of `time.perf_counter`, which the processes of a Linux host share."""
    time.sleep(max(0.0, starts_at - time.perf_counter()))


def times_ms(act: Callable[[], object], *, num_calls: int, starts_at: float) -> list[float]:
    """A closed loop: the milliseconds of each call."""
    wait_until(starts_at)
    taken = []
    for _ in range(num_calls):
        started = time.perf_counter()
        act()
        taken.append((time.perf_counter() - started) * 1_000)
    return taken
