"""Requests on their way to an engine: they can be stopped while they wait, and moved while they run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from rl_core.errors import EngineError
from rl_rollout.engines.protocol import GenerateRequest, NewTokens


class StoppedError(Exception):
    """A request was stopped before its engine had answered."""


class AbortedError(EngineError):
    """A request was aborted before an engine was asked."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request under way.

    Attributes:
        num_samples: How many responses, or scores, it is.
        request_id: What `RolloutEngine.abort` knows it by.
        is_aborted: Nobody is to be asked any more.
        is_asked: An engine is running it.
        has_told: Its caller has got tokens, which cannot be taken back: it cannot start again elsewhere.
    """

    num_samples: int
    request_id: str | None = None
    is_aborted: bool = False
    is_asked: bool = False
    has_told: bool = False
    _limit: asyncio.Timeout | None = field(default=None, init=False)

    def noting(self, request: GenerateRequest) -> GenerateRequest:
        """The request, whose first tokens are noted here."""
        on_tokens = request.on_tokens
        if on_tokens is None:
            return request

        def tell(tokens: NewTokens) -> None:
            self.has_told = True
            on_tokens(tokens)

        return replace(request, on_tokens=tell)

    @asynccontextmanager
    async def stoppable(self) -> AsyncIterator[None]:
        """In here `stop` ends what the request waits for.

        Raises:
            StoppedError: It did.
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
        """End what it waits for now, if anything."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def abort(self) -> None:
        """Stop dispatching; `abort` tells the engine that already runs it, which returns its partial result."""
        self.is_aborted = True
        if not self.is_asked:
            self.stop()
