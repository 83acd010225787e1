"""Whose training request runs next: each client's in its own order, and clients in turns."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rl_rollout.gateway import RefusedError
from rl_service.futures import Answer
from rl_service.settings import ClientLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request that waits for the learner.

    Attributes:
        owner: The training client.
        seq_id: Position in its client's order.
        request_id: Id of its result.
        run: Runs it on the learner's thread.
        num_tokens: Tokens that it computes.
        num_bytes: Size of its data.
    """

    owner: str
    seq_id: int
    request_id: str
    run: Callable[[], Answer]
    num_tokens: int = 0
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Line:
    """The waiting requests of a client, and how much it has been served."""

    next_seq_id: int
    waiting: dict[int, Work] = field(default_factory=dict)
    num_tokens: int = 0
    num_bytes: int = 0
    served: float = 0.0


class Turns:
    """Waiting requests of all training clients.

    A client's requests run in the order of `seq_id`, without gaps. Among clients whose next request has arrived, that
    with the fewest served tokens is next. A client that was idle gets no credit for that time.
    """

    def __init__(self, limits: ClientLimits) -> None:
        """Start without clients."""
        self._limits = limits
        self._lines: dict[str, _Line] = {}
        self._arrived = asyncio.Event()

    def open(self, owner: str, *, next_seq_id: int = 1) -> None:
        """Add a client, whose first request has this position."""
        self._lines[owner] = _Line(next_seq_id=next_seq_id, served=self._least_served())

    def close(self, owner: str) -> list[Work]:
        """Remove a client, and return its requests that did not run."""
        line = self._lines.pop(owner, None)
        return [] if line is None else list(line.waiting.values())

    def check_room(self, owner: str, *, seq_id: int, num_tokens: int, num_bytes: int) -> None:
        """Check that a client's request can wait. The one that is next may always.

        Raises:
            RefusedError: The client has too much waiting; it may ask again later.
        """
        line, limits = self._lines[owner], self._limits
        for name, most, more, has in (
            ("max_waiting", limits.max_waiting, 1, len(line.waiting)),
            ("max_waiting_tokens", limits.max_waiting_tokens, num_tokens, line.num_tokens),
            ("max_waiting_bytes", limits.max_waiting_bytes, num_bytes, line.num_bytes),
        ):
            if seq_id > line.next_seq_id and has + more > most:
                raise RefusedError(
                    f"limits.{name} = {most} for waiting requests of {owner}; it has {has}. Retry later.",
                    kind="rate_limit_error",
                )

    def put(self, work: Work) -> None:
        """Let a request wait for its turn.

        Raises:
            RefusedError: Its position has passed, or another request has it.
        """
        line = self._lines[work.owner]
        if work.seq_id < line.next_seq_id or work.seq_id in line.waiting:
            raise RefusedError(
                f"seq_id must be at least {line.next_seq_id} and new; found {work.seq_id} of {work.owner}. Requests of "
                "a training client are numbered from 1.",
                param="seq_id",
            )
        if not line.waiting:
            line.served = max(line.served, self._least_served())
        line.waiting[work.seq_id] = work
        line.num_tokens += work.num_tokens
        line.num_bytes += work.num_bytes
        self._arrived.set()

    async def next(self) -> Work:
        """Wait for a request whose turn has come."""
        while True:
            ready = [line for line in self._lines.values() if line.next_seq_id in line.waiting]
            if ready:
                line = min(ready, key=lambda one: one.served)
                work = line.waiting.pop(line.next_seq_id)
                line.next_seq_id += 1
                line.num_tokens -= work.num_tokens
                line.num_bytes -= work.num_bytes
                line.served += work.num_tokens + 1
                return work
            self._arrived.clear()
            await self._arrived.wait()

    def _least_served(self) -> float:
        return min((line.served for line in self._lines.values() if line.waiting), default=0.0)
