"""Results of requests, kept until their clients have them."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from rl_core.data import Json

JSON = "application/json"
KEPT_BYTES = 1024
"""Size of a kept result beside its content."""
TRIMMED_TO = 0.9
"""Share of the maximum size that is kept when it is exceeded, so that not every result needs a search."""
Category = Literal["user", "server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The body of a result.

    Attributes:
        content: The bytes.
        media_type: Their type.
    """

    content: bytes
    media_type: str = JSON

    @classmethod
    def of(cls, **values: Json) -> "Answer":
        """Return a JSON object."""
        return cls(content=msgspec.json.encode(values))

    @classmethod
    def failed(cls, message: str, category: Category) -> "Answer":
        """Return the failure of a request, by the client's or the server's fault."""
        return cls.of(error=message, category=category)


@dataclass(slots=True, eq=False)
class _Future:
    done: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer | None = None
    fetched_at: float | None = None


class Futures:
    """Results by request id. Finished ones are kept for clients that lost a response and ask again, within bounds."""

    def __init__(self, *, kept_s: float, kept_bytes: int) -> None:
        """Start without results.

        Args:
            kept_s: Seconds for which a result is kept after it was fetched.
            kept_bytes: Maximum size of kept results. Beyond it, results that were fetched are dropped first, then the
                oldest.
        """
        self._kept_s, self._kept_bytes = kept_s, kept_bytes
        self._futures: dict[str, _Future] = {}
        self._num_bytes = 0

    def knows(self, request_id: str) -> bool:
        """True if the result of a request is expected or kept."""
        return request_id in self._futures

    def open(self, request_id: str) -> None:
        """Expect the result of a request."""
        self._futures[request_id] = _Future()

    def settle(self, request_id: str, answer: Answer) -> None:
        """Set a result; without effect if nobody expects it any more."""
        future = self._futures.get(request_id)
        if future is None or future.answer is not None:
            return
        self._futures[request_id] = self._futures.pop(request_id)  # the newest of the finished ones
        future.answer = answer
        self._num_bytes += len(answer.content) + KEPT_BYTES
        future.done.set()
        self._trim()

    async def wait(self, request_id: str, *, timeout_s: float) -> Answer | None:
        """Return a result, or None if there is none after a time.

        Raises:
            KeyError: The request is not known, or no longer.
        """
        future = self._futures[request_id]
        try:
            async with asyncio.timeout(timeout_s):
                await future.done.wait()
        except TimeoutError:
            return None
        if future.answer is None:
            raise KeyError(request_id)
        future.fetched_at = time.monotonic()
        return future.answer

    def forget_open(self) -> int:
        """Expect no more results, and return how many were expected."""
        forgotten = [request_id for request_id, future in self._futures.items() if future.answer is None]
        for request_id in forgotten:
            self._futures.pop(request_id).done.set()
        return len(forgotten)

    def release(self, prefix: str) -> None:
        """Keep results only as long as if their client, whose requests begin with a prefix, had them all."""
        for request_id, future in self._futures.items():
            if request_id.startswith(prefix) and future.fetched_at is None:
                future.fetched_at = time.monotonic()

    def sweep(self) -> None:
        """Drop results that were fetched long ago."""
        last = time.monotonic() - self._kept_s
        for request_id, future in list(self._futures.items()):
            if future.fetched_at is not None and future.fetched_at < last:
                self._drop(request_id)

    def _trim(self) -> None:
        if self._num_bytes <= self._kept_bytes:
            return
        finished = [one for one, future in self._futures.items() if future.answer is not None]
        for request_id in sorted(finished[:-1], key=lambda one: self._futures[one].fetched_at is None):
            if self._num_bytes <= TRIMMED_TO * self._kept_bytes:
                return
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        answer = self._futures.pop(request_id).answer
        self._num_bytes -= 0 if answer is None else len(answer.content) + KEPT_BYTES
