"""Requests to an engine that wait, and that can be stopped while they wait or moved while they run.

Nothing here is bound to an event loop, because an engine may outlive several.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from rl_rollout.engines.protocol import GenerateRequest, NewTokens


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

    async def __aexit__(self, *_: object) -> None:
        """Release the lock to the next task."""
        self.is_taken = False
        self._left.announce()


class StoppedError(Exception):
    """A request was stopped before its engine answered."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request in progress.

    Attributes:
        num_samples: Number of responses or scores.
        request_id: Id for `RolloutEngine.abort`.
        is_aborted: Whether it must not reach another engine.
        is_running: Whether an engine is running it.
        has_streamed: Whether its caller has received tokens, which cannot be retracted, so the request cannot restart
            elsewhere.
    """

    num_samples: int
    request_id: str | None = None
    is_aborted: bool = False
    is_running: bool = False
    has_streamed: bool = False
    _limit: asyncio.Timeout | None = field(default=None, init=False)

    def noting_tokens(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with a callback that records its first tokens here."""
        on_tokens = request.on_tokens
        if on_tokens is None:
            return request

        def pass_on(tokens: NewTokens) -> None:
            self.has_streamed = True
            on_tokens(tokens)

        return replace(request, on_tokens=pass_on)

    @asynccontextmanager
    async def stoppable(self) -> AsyncIterator[None]:
        """Context in which `stop` ends the request's wait.

        Raises:
            StoppedError: `stop` was called.
        """
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limit = limit
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise StoppedError from None
        finally:
            self._limit = None

    def stop(self) -> None:
        """Stop the current wait, if any."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def abort(self) -> None:
        """Stop dispatching; `abort` tells the engine that already runs it, which returns its partial result."""
        self.is_aborted = True
        if not self.is_running:
            self.stop()
