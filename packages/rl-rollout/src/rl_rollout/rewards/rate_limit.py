"""Spreads calls over time."""

import asyncio
import time


class RateLimit:
    """Lets calls start at most so often; the first goes at once, each other one after its turn."""

    def __init__(self, calls_per_s: float) -> None:
        """Choose the rate.

        Args:
            calls_per_s: Above 0.
        """
        self._interval_s = 1.0 / calls_per_s
        self._next_at = 0.0

    async def wait(self) -> None:
        """Wait for the turn of one call."""
        now = time.monotonic()
        turn_at = max(self._next_at, now)
        self._next_at = turn_at + self._interval_s
        if turn_at > now:
            await asyncio.sleep(turn_at - now)
