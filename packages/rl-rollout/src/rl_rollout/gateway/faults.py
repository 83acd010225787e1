"""Logs faults of the gateway."""

import traceback

import structlog

from rl_rollout.rewards.outputs import cut, shown_error

log = structlog.get_logger(__name__)

MAX_TRACEBACK_CHARS = 16_384


class FaultLog:
    """Logs a line for each fault; only the first at a place in the code has its traceback.

    No traceback has the values of variables: keys of sessions are among them.
    """

    def __init__(self) -> None:
        """No fault is known."""
        self._known: set[tuple[type[Exception], str, int | None]] = set()

    def note(self, event: str, error: Exception, **about: str) -> None:
        """Log a fault that was caught.

        Args:
            event: Its name.
            error: What was raised.
            about: More of the event.
        """
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        place = type(error), innermost.filename, innermost.lineno
        if place not in self._known:
            self._known.add(place)
            about["stack"] = cut("".join(traceback.format_exception(error)), max_characters=MAX_TRACEBACK_CHARS)
        log.error(event, error=shown_error(error), **about)
