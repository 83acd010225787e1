"""An event loop in a thread of its own."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
CLOSE_S = 15.0
"""Longest wait for what is run last, and for the thread."""


class LoopThread:
    """An event loop in a daemon thread: whatever other loops do, what runs here goes on."""

    def __init__(self, name: str) -> None:
        """Start it."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run there, and wait here; cancelling the wait cancels it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run one last thing, and end the thread."""
        ending = asyncio.run_coroutine_threadsafe(last, self._loop)
        with contextlib.suppress(TimeoutError):
            ending.result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
