"""A gate that holds back an engine's new requests until the current ones end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

from rl_core.errors import DeadlineError
from rl_rollout.engines.protocol import GenerateRequest, Generation
from rl_rollout.engines.requests import aborted_generations
from rl_rollout.engines.tickets import StoppedError, Ticket
from rl_rollout.engines.waiting import Changes, Turn

DRAIN_DEADLINE_S = 3600.0
"""Maximum seconds for engines to finish their requests."""


class Gate:
    """Gate for the requests to one engine. It is open except while the engine drains."""

    def __init__(self) -> None:
        """Create an open gate."""
        self._is_open = True
        self._draining = Turn()
        self._num_inside = 0
        self._waiting: set[Ticket] = set()
        self._changes = Changes()

    async def through(
        self, request: GenerateRequest, generate: Callable[[GenerateRequest], Awaitable[list[Generation]]]
    ) -> list[Generation]:
        """Wait until the gate is open, and pass. A request that is aborted while it waits returns no tokens."""
        if not self._is_open and not await self._let_in(request):
            return aborted_generations(request)
        self._num_inside += 1
        try:
            return await generate(request)
        finally:
            self._num_inside -= 1
            self._changes.announce()

    def abort(self, request_ids: Collection[str] | None) -> None:
        """Stop these requests, or all, from waiting."""
        for ticket in list(self._waiting):
            if request_ids is None or ticket.request_id in request_ids:
                ticket.abort()

    @asynccontextmanager
    async def drained(self, deadline_s: float) -> AsyncIterator[None]:
        """Close the gate, wait until the current requests have ended, and open it again on exit.

        Raises:
            DeadlineError: The requests did not end in time.
        """
        async with self._draining:
            self._is_open = False
            try:
                await self._wait_until_empty(deadline_s)
                yield
            finally:
                self._is_open = True
                self._changes.announce()

    async def _wait_until_empty(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while self._num_inside:
                    await self._changes.next()
        except TimeoutError:
            raise DeadlineError(
                f"{self._num_inside} requests were still running {deadline_s:g} s after new ones were held back. "
                "Raise the deadline, shorten responses, or publish without drain."
            ) from None

    async def _let_in(self, request: GenerateRequest) -> bool:
        ticket = Ticket(num_samples=request.num_samples, request_id=request.request_id)
        self._waiting.add(ticket)
        try:
            async with ticket.stoppable():
                while not self._is_open:
                    await self._changes.next()
        except StoppedError:
            return False
        finally:
            self._waiting.discard(ticket)
        return True
