"""Runs blocking functions in threads that can be abandoned."""

import threading
from collections.abc import Callable
from typing import Any

from rl_core.errors import ToolError
from rl_rollout.rewards.outputs import preview, preview_error
from rl_rollout.rewards.threaded import CallThreads

FOREVER_S = 1e9
MAX_RUNNING = 256
"""Maximum number of concurrent calls, including abandoned ones, so that hanging functions cannot use up all threads."""


Outcome = tuple[Any, BaseException | None]
"""Return value of a function, and the exception that it raised."""


class BlockingCalls:
    """Runs functions in threads, and returns or raises their outcome to the caller."""

    def __init__(self) -> None:
        """Create the pool. Threads start in `run`."""
        self._threads: CallThreads[Callable[[], Any], Outcome] = CallThreads(self._call)
        self._num_running = 0
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], Any], *, timeout_s: float = FOREVER_S) -> Any:
        """Call a function once. After timeout_s or a cancellation, its thread is abandoned.

        Raises:
            TimeoutError: The call took longer than timeout_s.
            ToolError: MAX_RUNNING earlier calls are still running.
        """
        with self._lock:
            if self._num_running >= MAX_RUNNING:
                raise ToolError(f"{self._num_running} earlier calls are still running; no other can start.")
            self._num_running += 1
        outcomes = await self._threads.run([function], timeout_s=timeout_s)
        if not outcomes:
            raise TimeoutError(f"it did not return within {timeout_s:g} s and was abandoned")
        value, error = outcomes[0]
        if error is not None:
            raise error
        return value

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
