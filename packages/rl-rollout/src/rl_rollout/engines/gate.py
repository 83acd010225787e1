"""Holds new requests of an engine back while it ends those that it has."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

from rl_core.errors import DeadlineError
from rl_rollout.engines.protocol import GenerateRequest, Generation
from rl_rollout.engines.requests import aborted_generations
from rl_rollout.engines.tickets import StoppedError, Ticket
from rl_rollout.engines.waiting import Changes, Turn

DRAIN_DEADLINE_S = 3600.0
"""How long engines may take to end what they have."""


class Gate:
    """What requests to one engine pass. It is open, but while the engine is drained."""

    def __init__(self) -> None:
        """Nobody is inside."""
        self._is_open = True
        self._draining = Turn()
        self._num_inside = 0
        self._waiting: set[Ticket] = set()
        self._changes = Changes()

    async def through(
        self, request: GenerateRequest, generate: Callable[[GenerateRequest], Awaitable[list[Generation]]]
    ) -> list[Generation]:
        """Let a request to its engine, as soon as it may; one that is aborted before has no token."""
        if not self._is_open and not await self._let_in(request):
            return aborted_generations(request)
        self._num_inside += 1
        try:
            return await generate(request)
        finally:
            self._num_inside -= 1
            self._changes.announce()

    def abort(self, request_ids: Collection[str] | None) -> None:
        """Let these requests, or all, wait no longer."""
        for ticket in list(self._waiting):
            if request_ids is None or ticket.request_id in request_ids:
                ticket.abort()

    @asynccontextmanager
    async def drained(self, deadline_s: float) -> AsyncIterator[None]:
        """Hold new requests back, and wait until the others have left; open again at the end.

        Raises:
            DeadlineError: They did not leave.
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
                f"{self._num_inside} requests had not ended {deadline_s:g} s after new ones were held back. Give them "
                "longer, shorten responses, or publish without drain."
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
