"""Simulated engines that decode many responses at once, and advance from one change of the batch to the next."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

FOREVER = float("inf")


@dataclass(slots=True)
class Response:
    """One response to generate.

    Attributes:
        group: Number of its group.
        num_tokens: Number of tokens to generate.
        num_prompt_tokens: Number of prompt tokens.
        version: Policy version that sampled its first token; None before that.
    """

    group: int
    num_tokens: int
    num_prompt_tokens: int
    version: int | None = None


@dataclass(slots=True)
class SimulatedEngine:
    """Continuous batching: every running response gets one token in each decoding step.

    All running responses therefore advance equally. A response that is admitted after p decoding steps ends at step p +
    its length, so a heap of these ends gives the next change.

    Attributes:
        step_seconds: Seconds of a decoding step, by number of responses decoded at once, from 0 to the number of slots.
        prefill_s_per_token: Seconds per prompt token, during which nothing is decoded.
        now: Current time of this engine.
        busy_s: Seconds of decoding and prefill so far.
        ends_at: Time of the next end if no response is added; infinity if none runs.
    """

    step_seconds: Sequence[float]
    prefill_s_per_token: float = 0.0
    now: float = 0.0
    busy_s: float = 0.0
    ends_at: float = FOREVER
    _steps: float = 0.0
    _decodes_from: float = 0.0
    _stalled_until: float = 0.0
    _running: list[tuple[float, int, Response]] = field(default_factory=list)
    _waiting: deque[Response] = field(default_factory=deque)
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def load(self) -> int:
        """Number of running and waiting responses."""
        return len(self._running) + len(self._waiting)

    def add(self, responses: Sequence[Response], *, now: float) -> list[Response]:
        """Add responses, and return those that begin at once. The others wait for slots."""
        self._move(now)
        self._waiting.extend(responses)
        began = self._admit()
        self._foresee()
        return began

    def finish(self) -> tuple[list[Response], list[Response]]:
        """Advance to `ends_at`, and return the responses that ended and those that began in their place."""
        self._move(self.ends_at)
        running, steps = self._running, self._steps + 1e-6
        ended = []
        while running and running[0][0] <= steps:
            ended.append(heappop(running)[2])
        began = self._admit() if self._waiting else []
        self._foresee()
        return ended, began

    def stall(self, seconds: float, *, now: float, recomputes_prefixes: bool) -> None:
        """Stop for a weight update. Running responses continue afterwards, prefilled again with recomputes_prefixes."""
        self._move(now)
        self._stalled_until = max(self._stalled_until, now) + seconds
        self._decodes_from = max(self._decodes_from, self._stalled_until)
        if recomputes_prefixes:
            tokens = sum(
                response.num_prompt_tokens + response.num_tokens - (end - self._steps)
                for end, _, response in self._running
            )
            self._decodes_from += tokens * self.prefill_s_per_token
        self._foresee()

    def _move(self, now: float) -> None:
        num_running = len(self._running)
        if num_running:
            decodes_from = self._decodes_from if self._decodes_from > self.now else self.now
            if now > decodes_from:
                self._steps += (now - decodes_from) / self.step_seconds[num_running]
            busy_from = self._stalled_until if self._stalled_until > self.now else self.now
            if now > busy_from:
                self.busy_s += now - busy_from
        self.now = now

    def _admit(self) -> list[Response]:
        free = len(self.step_seconds) - 1 - len(self._running)
        waiting, running, steps = self._waiting, self._running, self._steps
        began = [waiting.popleft() for _ in range(min(free, len(waiting)))]
        for response in began:
            heappush(running, (steps + response.num_tokens, next(self._numbers), response))
        if began and self.prefill_s_per_token:
            tokens = sum(response.num_prompt_tokens for response in began)
            self._decodes_from = max(self._decodes_from, self.now) + tokens * self.prefill_s_per_token
        return began

    def _foresee(self) -> None:
        running = self._running
        if not running:
            self.ends_at = FOREVER
            return
        decodes_from = self._decodes_from if self._decodes_from > self.now else self.now
        self.ends_at = decodes_from + (running[0][0] - self._steps) * self.step_seconds[len(running)]


class EnginePool:
    """Several equal engines. A response goes to the engine with the fewest responses."""

    def __init__(self, num_engines: int, step_seconds: Sequence[float], *, prefill_s_per_token: float = 0.0) -> None:
        """Create empty engines."""
        self.engines = [
            SimulatedEngine(step_seconds, prefill_s_per_token=prefill_s_per_token) for _ in range(num_engines)
        ]
        self._by_end: list[tuple[float, int]] = []

    def add(self, responses: Sequence[Response], *, now: float) -> list[Response]:
        """Distribute responses, and return those that begin at once."""
        loads = [(engine.load, index) for index, engine in enumerate(self.engines)]
        heapify(loads)
        shares: dict[int, list[Response]] = {}
        for response in responses:
            load, index = loads[0]
            heapreplace(loads, (load + 1, index))
            shares.setdefault(index, []).append(response)
        began = []
        for index, share in shares.items():
            began += self.engines[index].add(share, now=now)
            self._expect(index)
        return began

    def next_end(self) -> float:
        """Return the time at which the next response ends; infinity if none runs."""
        while self._by_end:
            time, index = self._by_end[0]
            if self.engines[index].ends_at == time:
                return time
            heappop(self._by_end)
        return FOREVER

    def finish(self) -> tuple[list[Response], list[Response]]:
        """Advance the engine of `next_end`, and return the responses that ended and those that began in their place."""
        index = heappop(self._by_end)[1]
        found = self.engines[index].finish()
        self._expect(index)
        return found

    def stall(self, seconds: float, *, now: float, recomputes_prefixes: bool) -> None:
        """Stop all engines for a weight update."""
        for index, engine in enumerate(self.engines):
            engine.stall(seconds, now=now, recomputes_prefixes=recomputes_prefixes)
            self._expect(index)

    def busy_seconds(self, *, now: float) -> float:
        """Return the busy seconds of all engines up to a time, which must not be before any change."""
        for index, engine in enumerate(self.engines):
            engine.add((), now=now)
            self._expect(index)
        return sum(engine.busy_s for engine in self.engines)

    def _expect(self, index: int) -> None:
        ends_at = self.engines[index].ends_at
        if ends_at != FOREVER:
            heappush(self._by_end, (ends_at, index))
