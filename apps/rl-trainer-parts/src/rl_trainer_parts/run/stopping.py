"""Stopping a run by Ctrl-C, SIGTERM, a closed terminal, or itself; a second signal ends it at once."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, TypeVar

import structlog

from rl_core.errors import DeadlineError

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


PAUSED = 3
"""Exit status of a run that paused itself for inspection and can be resumed."""


class StopRequestedError(Exception):
    """The user, or the run itself, requested a stop."""


class StopSignal:
    """Remembers the first signal or the reason for a pause, and wakes all waiters."""

    def __init__(self, on_signal: Callable[[], object] = lambda: None) -> None:
        """Start without a request.

        Args:
            on_signal: Called by the handler of the first signal, while the main thread may be anywhere.
        """
        self._on_signal = on_signal
        self.number: int | None = None
        self.pause_reason: str | None = None
        self._event = asyncio.Event()
        self._before: dict[int, Any] = {}

    @property
    def is_paused(self) -> bool:
        """True if the run paused itself and no signal arrived."""
        return self.number is None and self.pause_reason is not None

    @property
    def exit_status(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP, 3 if the run paused itself."""
        if self.is_paused:
            return PAUSED
        return 128 + (self.number or signal.SIGTERM)

    def __enter__(self) -> "StopSignal":
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if number == signal.SIGHUP and before == signal.SIG_IGN:
                continue  # nohup: the run outlives the terminal
            self._before[number] = before
            loop.add_signal_handler(number, self._wake)  # wakes the loop even if it is about to wait
            signal.signal(number, self._receive)  # runs even while the loop is busy
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number, handler in self._before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.number is None:
            self.number = number
            self._on_signal()
        elif number != signal.SIGHUP:  # a closing terminal may send it twice
            os._exit(128 + number)

    def _wake(self) -> None:
        if self.number is not None:  # otherwise a fork of this process received it, which shares the wakeup descriptor
            self._event.set()

    def pause(self, reason: str) -> None:
        """Request a stop after the current work; the first reason counts."""
        if self.pause_reason is None:
            self.pause_reason = reason
            self._event.set()

    def check(self) -> None:
        """Raise StopRequestedError after a signal or a requested pause."""
        if self.number is not None or self.pause_reason is not None:
            raise StopRequestedError

    async def wait(self) -> None:
        """Return at the first signal or requested pause."""
        await self._event.wait()

    async def run(self, work: Coroutine[Any, Any, Result], *, what: str, deadline_s: float) -> Result:
        """Wait for work; cancel it on a signal or when it takes too long.

        Args:
            work: The work.
            what: Its name in the error, such as "rollouts of step 3".
            deadline_s: Maximum wait in seconds.

        Raises:
            StopRequestedError: A signal came first; the work was cancelled and has ended.
            DeadlineError: The time ran out; the work was cancelled and has ended.
        """
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, stop}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                error = None if task.cancelled() else task.exception()
                if error is not None and self.number is not None:  # Ctrl-C reaches child processes too
                    log.warning("failed_while_stopping", waited_for=what, error=f"{type(error).__name__}: {error}")
                    raise StopRequestedError from error
                return task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if stop.done():
                raise StopRequestedError
            raise DeadlineError(f"waited {deadline_s:g} s for the {what} and gave up.")
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
