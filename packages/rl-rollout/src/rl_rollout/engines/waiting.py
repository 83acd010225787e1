"""Waits for changes made by other tasks. Not bound to an event loop, because an engine may outlive several."""

import asyncio
from types import TracebackType


class Changes:
    """Wakes all waiters at the next change."""

    def __init__(self) -> None:
        """Start without waiters."""
        self._waiting: set[asyncio.Future[None]] = set()

    async def next(self) -> None:
        """Wait until the next `announce`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def announce(self) -> None:
        """Wake all waiters."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class Turn:
    """A lock: one task at a time (`async with`)."""

    def __init__(self) -> None:
        """Start unlocked."""
        self._left = Changes()
        self.is_taken = False

    async def __aenter__(self) -> None:
        """Wait for the lock."""
        while self.is_taken:
            await self._left.next()
        self.is_taken = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Release the lock to the next task."""
        self.is_taken = False
        self._left.announce()
