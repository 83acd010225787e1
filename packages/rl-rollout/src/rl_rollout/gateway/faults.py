"""Logs faults of the gateway."""

import traceback

import structlog

from rl_rollout.rewards.outputs import cut, preview_error

log = structlog.get_logger(__name__)

MAX_TRACEBACK_CHARS = 16_384


class FaultLog:
    """Logs one line per fault, with a traceback only for the first fault at each place in the code.

    Tracebacks never contain values of variables, which include session keys.
    """

    def __init__(self) -> None:
        """Start without known faults."""
        self._known: set[tuple[type[Exception], str, int | None]] = set()

    def note(self, event: str, error: Exception, **about: str) -> None:
        """Log a caught error.

        Args:
            event: Name of the log event.
            error: The error.
            about: Further fields of the event.
        """
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        place = type(error), innermost.filename, innermost.lineno
        if place not in self._known:
            self._known.add(place)
            about["stack"] = cut("".join(traceback.format_exception(error)), max_characters=MAX_TRACEBACK_CHARS)
        log.error(event, error=preview_error(error), **about)
