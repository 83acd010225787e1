"""Sessions that are offered to workers. It needs no HTTP, so that the gateway imports without its extra."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_core.data import Json
from rl_core.errors import RolloutError
from rl_rollout.gateway.sessions import Session


@dataclass(slots=True, kw_only=True, eq=False)
class Offer:
    """A session offered to workers.

    Attributes:
        session: The session.
        shown: Fields that its worker receives in addition to the key.
        ends_at: Deadline by the monotonic clock; the session fails if it is not finished by then.
        is_claimed: True once a worker has claimed it.
        is_finished: Set once the worker has finished it.
    """

    session: Session
    shown: Mapping[str, Json]
    ends_at: float
    is_claimed: bool = False
    is_finished: asyncio.Event = field(default_factory=asyncio.Event)


class Offers:
    """Queue of offers; each goes to one worker."""

    def __init__(self) -> None:
        """Start without offers."""
        self._waiting: asyncio.Queue[Offer] = asyncio.Queue()
        self._by_id: dict[str, Offer] = {}

    async def finished(self, session: Session, shown: Mapping[str, Json], *, deadline_s: float) -> None:
        """Offer a session and wait until its worker has finished it.

        Raises:
            RolloutError: No worker claimed or finished the session by the deadline.
        """
        offer = Offer(session=session, shown=shown, ends_at=time.monotonic() + deadline_s)
        self._by_id[session.session_id] = offer
        self._waiting.put_nowait(offer)
        try:
            async with asyncio.timeout(deadline_s):
                await offer.is_finished.wait()
        except TimeoutError:
            what = "finished by its worker" if offer.is_claimed else "claimed by a worker"
            raise RolloutError(f"the session was not {what} within {deadline_s:g} s.") from None
        finally:
            del self._by_id[session.session_id]

    async def claim(self) -> Offer:
        """Wait for the next offer and claim it for the caller."""
        while True:
            offer = await self._waiting.get()
            if offer.session.session_id in self._by_id:
                offer.is_claimed = True
                return offer

    def finish(self, session: Session) -> bool:
        """Mark a session as finished; return False if it was not offered."""
        offer = self._by_id.get(session.session_id)
        if offer is not None:
            offer.is_finished.set()
        return offer is not None
