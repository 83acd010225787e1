"""A thread that makes blocking calls one after another, and that can be left behind."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Generic, TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


class SerialThread(Generic[Given, Result]):
    """Calls a function on each input, in a daemon thread; a call that hangs does not hold up the exit.

    Attributes:
        is_abandoned: True once `wait` gave up on a call; the thread ends when that call does.
    """

    def __init__(self, call: Callable[[Given], Result], inputs: Sequence[Given]) -> None:
        """Start the thread, from a running event loop.

        Args:
            call: What to call; it must not raise.
            inputs: One call each.
        """
        self.is_abandoned = False
        self._call = call
        self._inputs = inputs
        self._results: list[Result] = []
        self._call_started_at = time.perf_counter()
        self._lock = Lock()
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        Thread(target=self._run, name="reward", daemon=True).start()

    async def wait(self, *, timeout_s: float) -> list[Result]:
        """All results, or those before the first call that took longer than timeout_s."""
        try:
            while not self._done.is_set():
                with self._lock:
                    remaining_s = self._call_started_at + timeout_s - time.perf_counter()
                    if remaining_s <= 0 and len(self._results) < len(self._inputs):
                        self.is_abandoned = True
                        return list(self._results)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(remaining_s, 0.001)):
                        await self._done.wait()
        except asyncio.CancelledError:
            self.is_abandoned = True
            raise
        return self._results

    def _run(self) -> None:
        for given in self._inputs:
            result = self._call(given)
            with self._lock:
                if self.is_abandoned:
                    return
                self._results.append(result)
                self._call_started_at = time.perf_counter()
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._done.set)
