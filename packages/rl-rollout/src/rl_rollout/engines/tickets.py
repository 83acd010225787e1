"""Requests to an engine that can be stopped while they wait, and moved while they run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from rl_core.errors import EngineError
from rl_rollout.engines.protocol import GenerateRequest, NewTokens


class StoppedError(Exception):
    """A request was stopped before its engine answered."""


class AbortedError(EngineError):
    """A request was aborted before it reached an engine."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in progress.

    Attributes:
        num_samples: Number of responses or scores.
        request_id: Id for `RolloutEngine.abort`.
        is_aborted: Whether it must not reach another engine.
        is_asked: Whether an engine is running it.
        has_told: Whether its caller has received tokens, which cannot be retracted, so the request cannot restart
            elsewhere.
    """

    num_samples: int
    request_id: str | None = None
    is_aborted: bool = False
    is_asked: bool = False
    has_told: bool = False
    _limit: asyncio.Timeout | None = field(default=None, init=False)

    def noting(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with a callback that records its first tokens here."""
        on_tokens = request.on_tokens
        if on_tokens is None:
            return request

        def tell(tokens: NewTokens) -> None:
            self.has_told = True
            on_tokens(tokens)

        return replace(request, on_tokens=tell)

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
        if not self.is_asked:
            self.stop()
