"""The time of reward calls that counts against their timeout, and threads for calls that block or hang."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

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


Given = TypeVar("Given")
Result = TypeVar("Result")


class CallThreads(Generic[Given, Result]):
    """Pool of daemon threads, so that a call that hangs blocks neither other calls nor the exit."""

    def __init__(self, call: Callable[[Given], Result]) -> None:
        """Store the function. Threads start in `run`.

        Args:
            call: Function that the threads call; it must not raise.
        """
        self._call = call
        self._idle: list[SimpleQueue[_CallJob[Given, Result] | None]] = []

    async def run(self, inputs: Sequence[Given], *, timeout_s: float) -> list[Result]:
        """Call the function on each input in order, in one thread.

        Returns:
            All results, or only those before the first call that took longer than timeout_s.
        """
        job = _CallJob(self._call, inputs)
        jobs = self._idle.pop() if self._idle else self._start()
        jobs.put(job)
        try:
            results = await job.wait(timeout_s=timeout_s)
        finally:
            if job.is_abandoned:
                jobs.put(None)
            else:
                self._idle.append(jobs)
        return results

    def close(self) -> None:
        """Stop the idle threads."""
        while self._idle:
            self._idle.pop().put(None)

    @staticmethod
    def _start() -> "SimpleQueue[_CallJob[Given, Result] | None]":
        jobs: SimpleQueue[_CallJob[Given, Result] | None] = SimpleQueue()
        Thread(target=_serve, args=(jobs,), name="reward", daemon=True).start()
        return jobs


class _CallJob(Generic[Given, Result]):
    """Calls in order. `run` runs in the thread, `wait` on the event loop."""

    def __init__(self, call: Callable[[Given], Result], inputs: Sequence[Given]) -> None:
        self.is_abandoned = False
        self._call = call
        self._inputs = inputs
        self._results: list[Result] = []
        self._clock = CallClock()
        self._lock = Lock()
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()

    def run(self) -> None:
        for given in self._inputs:
            CLOCK.set(self._clock)
            result = self._call(given)
            with self._lock:
                if self.is_abandoned:
                    return
                self._results.append(result)
                self._clock = CallClock()
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._done.set)

    async def wait(self, *, timeout_s: float) -> list[Result]:
        try:
            while not self._done.is_set():
                remaining_s = self._give_up_after(timeout_s)
                if self.is_abandoned:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(remaining_s, 0.01)):
                        await self._done.wait()
        except asyncio.CancelledError:
            self.is_abandoned = True
            raise
        return self._results

    def _give_up_after(self, timeout_s: float) -> float:
        with self._lock:
            remaining_s = timeout_s - self._clock.used_s()
            self.is_abandoned = remaining_s <= 0 and len(self._results) < len(self._inputs)
            return remaining_s


def _serve(jobs: "SimpleQueue[_CallJob[Given, Result] | None]") -> None:
    while (job := jobs.get()) is not None:
        job.run()
