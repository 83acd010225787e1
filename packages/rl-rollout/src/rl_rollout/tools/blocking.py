"""Blocking functions in threads that can be left behind."""

import threading
from collections.abc import Callable
from typing import Any

from rl_core.errors import ToolError
from rl_rollout.rewards.outputs import shown, shown_error
from rl_rollout.rewards.threaded import CallThreads

FOREVER_S = 1e9
MAX_RUNNING = 256
"""Calls at once, the ones that were left behind included: a function that always hangs runs out of threads."""


Outcome = tuple[Any, BaseException | None]
"""What a function gave, and what it raised."""


class BlockingCalls:
    """Runs functions; what they give or raise comes back to who awaits them."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._threads: CallThreads[Callable[[], Any], Outcome] = CallThreads(self._call)
        self._num_running = 0
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], Any], *, timeout_s: float = FOREVER_S) -> Any:
        """Call a function once; when this is cancelled, or timeout_s passes, its thread is left behind.

        Raises:
            TimeoutError: It took longer than timeout_s.
            ToolError: MAX_RUNNING earlier calls are running or hang.
        """
        with self._lock:
            if self._num_running >= MAX_RUNNING:
                raise ToolError(f"{self._num_running} earlier calls are running or hang; no more fit.")
            self._num_running += 1
        outcomes = await self._threads.run([function], timeout_s=timeout_s)
        if not outcomes:
            raise TimeoutError(f"it gave nothing for {timeout_s:g} s, and was left behind")
        value, error = outcomes[0]
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the idle threads."""
        self._threads.close()

    def _call(self, function: Callable[[], Any]) -> Outcome:
        try:
            return function(), None
        except SystemExit as error:
            return None, RuntimeError(f"it called sys.exit({shown(error.code)})")
        except Exception as error:
            return None, error
        except BaseException as error:  # nobody interrupts or cancels this thread: it is the function's own
            return None, RuntimeError(f"it raised {shown_error(error)}")
        finally:
            with self._lock:
                self._num_running -= 1
