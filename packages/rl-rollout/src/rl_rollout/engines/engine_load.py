"""An engine's load and idle time, as its caller sees them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EngineState = Literal["starting", "serving", "restarting", "draining", "dead"]
"""A draining engine ends what it has, and takes no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One replica of several; counts and times are since it was there first, its restarts included.

    Attributes:
        index: Which replica.
        state: What it does.
        num_running: Samples that it is asked for and has not ended; sequences to score are samples too.
        busy_s: Seconds with at least one of these.
        idle_s: Seconds without any, whatever the reason: no request, an update, a restart, or its end.
        num_tokens: Tokens of the responses that it has ended, aborted ones included.
        num_requests: Requests that it was asked, also those that it did not end.
        num_restarts: How often it was started again.
    """

    index: int
    state: EngineState
    num_running: int
    busy_s: float
    idle_s: float
    num_tokens: int
    num_requests: int
    num_restarts: int


class LoadMeter:
    """Counts what one replica does.

    Attributes:
        num_running: Samples under way.
        num_tokens: See `EngineLoad`.
        num_restarts: See `EngineLoad`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing is counted before `begin_life`.

        Args:
            clock: Seconds.
        """
        self.num_running = 0
        self.num_tokens = 0
        self.num_restarts = 0
        self._num_requests = 0
        self._clock = clock
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._began_at: float | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it was there at all."""
        return self._began_at is not None

    def begin_life(self) -> None:
        """The engine is there: from now on it is busy or idle."""
        self._began_at = self._clock()

    def begin(self, num_samples: int) -> None:
        """It is asked."""
        if not self.num_running:
            self._busy_since = self._clock()
        self.num_running += num_samples
        self._num_requests += 1

    def end(self, num_samples: int) -> None:
        """It has answered, or never will."""
        self.num_running -= num_samples
        if not self.num_running:
            self._busy_s += self._clock() - self._busy_since

    def load(self, index: int, state: EngineState) -> EngineLoad:
        """What is counted so far."""
        now = self._clock()
        busy_s = self._busy_s + (now - self._busy_since if self.num_running else 0.0)
        lived_s = 0.0 if self._began_at is None else now - self._began_at
        return EngineLoad(
            index=index,
            state=state,
            num_running=self.num_running,
            busy_s=busy_s,
            idle_s=max(lived_s - busy_s, 0.0),
            num_tokens=self.num_tokens,
            num_requests=self._num_requests,
            num_restarts=self.num_restarts,
        )
