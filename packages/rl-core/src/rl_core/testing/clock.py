"""Time in tests: a clock that stands still, and waits for conditions."""

import threading
import time
from collections.abc import Callable


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        """Stand still at `now`."""
        self._now = now
        self.num_reads = 0

    def __call__(self) -> float:
        """The time now."""
        self.num_reads += 1
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


def wait_until(condition: Callable[[], bool], what: str, *, deadline_s: float = 10.0) -> None:
    """Wait for a condition that nothing announces.

    Raises:
        TimeoutError: It did not come true; the message says what was waited for.
    """
    ends_at = time.monotonic() + deadline_s
    never = threading.Event()
    while not condition():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"waited {deadline_s:g} s for {what}.")
        never.wait(0.002)
