"""The time of a reward call that counts against its timeout."""

import time
from contextvars import ContextVar
from threading import Lock

now = time.perf_counter


class CallClock:
    """Measures one call, without its waits for a worker process and that process's start."""

    def __init__(self) -> None:
        """Start to measure."""
        self._lock = Lock()
        self._started_at = now()
        self._paused_at: float | None = None
        self._paused_s = 0.0

    def used_s(self) -> float:
        """Return the seconds that count."""
        with self._lock:
            until = now() if self._paused_at is None else self._paused_at
            return until - self._started_at - self._paused_s

    def pause(self) -> None:
        """Stop to count, until `resume`. A second call changes nothing."""
        with self._lock:
            self._paused_at = now() if self._paused_at is None else self._paused_at

    def resume(self) -> None:
        """Count again."""
        with self._lock:
            if self._paused_at is not None:
                self._paused_s += now() - self._paused_at
            self._paused_at = None


CLOCK: ContextVar[CallClock | None] = ContextVar("reward_call_clock", default=None)


def current_clock() -> CallClock:
    """Return the clock of the call that runs here; a new one outside of a scorer."""
    return CLOCK.get() or CallClock()
