"""Waiting for what other tasks do. Nothing here belongs to one event loop: an engine may outlive several."""

import asyncio
from types import TracebackType


class Changes:
    """Wakes all waiters at the next change."""

    def __init__(self) -> None:
        """Nobody waits."""
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
        """Something has changed."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class Turn:
    """One task at a time (`async with`)."""

    def __init__(self) -> None:
        """It is nobody's."""
        self._left = Changes()
        self.is_taken = False

    async def __aenter__(self) -> None:
        """Wait for it."""
        while self.is_taken:
            await self._left.next()
        self.is_taken = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Let the next one in."""
        self.is_taken = False
        self._left.announce()
