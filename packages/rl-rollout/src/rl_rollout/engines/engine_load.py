"""An engine's load and idle time, as its caller measures them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EngineState = Literal["starting", "serving", "restarting", "draining", "dead"]
"""State of an engine; a draining one finishes its requests and accepts no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of one replica. Counts and times include restarts.

    Attributes:
        index: Index of the replica.
        state: Current state.
        num_running: Samples that it is generating or scoring.
        busy_s: Seconds with at least one running sample.
        idle_s: Seconds without a running sample, including weight updates, restarts and the time after its end.
        num_tokens: Response tokens of finished samples, including aborted ones.
        num_requests: Requests it received, including unfinished ones.
        num_restarts: Number of restarts.
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
    """Measures the load of one replica.

    Attributes:
        num_running: Samples in progress.
        num_tokens: See `EngineLoad`.
        num_restarts: See `EngineLoad`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create a meter. It counts nothing before `begin_life`.

        Args:
            clock: Returns seconds.
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
        """Return True if the engine has started before."""
        return self._began_at is not None

    def begin_life(self) -> None:
        """Record that the engine is up. It is busy or idle from now on."""
        self._began_at = self._clock()

    def begin(self, num_samples: int) -> None:
        """Record a new request."""
        if not self.num_running:
            self._busy_since = self._clock()
        self.num_running += num_samples
        self._num_requests += 1

    def end(self, num_samples: int) -> None:
        """Record that a request ended, with or without an answer."""
        self.num_running -= num_samples
        if not self.num_running:
            self._busy_s += self._clock() - self._busy_since

    def load(self, index: int, state: EngineState) -> EngineLoad:
        """Return the counts so far."""
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
