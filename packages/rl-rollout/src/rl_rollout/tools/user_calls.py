"""Calls of users' code with deadlines, in threads or tasks that can be abandoned."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rl_core.errors import ToolError
from rl_rollout.rewards.calls import CallThreads
from rl_rollout.rewards.outputs import preview, preview_error
from rl_rollout.user_errors import is_meant_for_us

FOREVER_S = 1e9
MAX_RUNNING = 256
"""Maximum number of concurrent calls, including abandoned ones, so that hanging functions cannot use up all threads."""


LEFT_BEHIND: set[asyncio.Task[Any]] = set()
"""Abandoned tasks that still run. References keep them from being collected."""

Outcome = tuple[Any, BaseException | None]
"""Return value of a call, and the exception that it raised."""


async def outcome_within(timeout_s: float, call: Awaitable[Any]) -> Outcome:
    """Await a call in a task. After timeout_s or a cancellation it is cancelled, and abandoned if it refuses.

    Raises:
        TimeoutError: The call took longer than timeout_s. One that the call raises is returned.
    """
    task = asyncio.create_task(_caught(call))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
            LEFT_BEHIND.add(task)
            task.add_done_callback(LEFT_BEHIND.discard)
    if not task.done():
        raise TimeoutError
    return (None, asyncio.CancelledError()) if task.cancelled() else task.result()


async def _caught(call: Awaitable[Any]) -> Outcome:
    """Return a call's result or its exception. A SystemExit of a task, for example, would end the event loop."""
    try:
        return await call, None
    except BaseException as error:
        if is_meant_for_us(error):
            raise
        return None, error


class BlockingCalls:
    """Runs functions in threads, and returns their outcome to the caller."""

    def __init__(self) -> None:
        """Create the pool. Threads start in `run`."""
        self._threads: CallThreads[Callable[[], Any], Outcome] = CallThreads(self._call)
        self._num_running = 0
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], Any], *, timeout_s: float = FOREVER_S) -> Outcome:
        """Call a function once. After timeout_s or a cancellation, its thread is abandoned.

        Raises:
            TimeoutError: The call took longer than timeout_s. One that the function raises is returned.
            ToolError: MAX_RUNNING earlier calls are still running.
        """
        with self._lock:
            if self._num_running >= MAX_RUNNING:
                raise ToolError(f"{self._num_running} earlier calls are still running; no other can start.")
            self._num_running += 1
        outcomes = await self._threads.run([function], timeout_s=timeout_s)
        if not outcomes:
            raise TimeoutError
        return outcomes[0]

    def close(self) -> None:
        """Stop the idle threads."""
        self._threads.close()

    def _call(self, function: Callable[[], Any]) -> Outcome:
        try:
            return function(), None
        except SystemExit as error:
            return None, RuntimeError(f"it called sys.exit({preview(error.code)})")
        except Exception as error:
            return None, error
        except BaseException as error:  # nothing interrupts or cancels this thread, so the function raised it
            return None, RuntimeError(f"it raised {preview_error(error)}")
        finally:
            with self._lock:
                self._num_running -= 1
