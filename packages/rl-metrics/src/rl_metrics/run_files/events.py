"""events.jsonl: structured events of a run."""

import re
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from rl_core.data import Json
from rl_core.errors import DataError
from rl_core.record_fields import converts_arguments
from rl_metrics.run_files.json_lines import JsonLinesWriter, read_json_lines

log = structlog.get_logger(__name__)

EVENT_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
"""Pattern of event names, which are constant; variable data belongs in fields."""

RESERVED = frozenset({"event", "time"})

BEGUN = ("run_started", "run_resumed")
"""Events that start a launch of a run."""
ENDED = ("run_finished", "run_stopped", "run_failed")
"""Events that end a launch; a killed one has none."""
IMPORTED = "run_imported"
"""The first event of an imported run."""


class EventLog:
    """Appends events to a file, from any thread; a kill at any moment loses at most the line being written.

    A file that cannot be written, as on a full disk, causes one warning and no further events, but does not stop the
    run.

    Attributes:
        newest: Newest event of each name passed to `write`.
    """

    @converts_arguments
    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; existing events are kept.

        Args:
            path: Path of the file, such as `run/events.jsonl`.
            clock: Returns seconds since the epoch.
        """
        self._writer = JsonLinesWriter(path)
        self._clock = clock
        self._is_off = False
        self._lock = threading.Lock()
        self.newest: dict[str, dict[str, Any]] = {}

    def write(self, event: str, /, **fields: Json) -> None:
        """Append one event.

        Args:
            event: Constant snake_case name, such as "checkpoint_saved".
            fields: Data of the event, such as step=20; values that are not JSON are written as text.

        Raises:
            DataError: The name is not snake_case, or a field is called "event" or "time".
        """
        if not EVENT_NAME.fullmatch(event):
            raise DataError(
                f"an event's name must be constant snake_case; found {event!r}. Put variable data into fields."
            )
        if reserved := RESERVED & fields.keys():
            raise DataError(f"event {event!r} has a field {min(reserved)!r}, which is reserved; rename it.")
        self.newest[event] = {"event": event, **fields}
        self._append(event, fields)

    def structlog_processor(
        self, _logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Copy warnings and errors into the file and return the event; a structlog processor."""
        if method in ("warning", "error", "critical", "exception"):
            fields = {key: value for key, value in event.items() if key not in ("event", "timestamp", *RESERVED)}
            self._append(str(event.get("event", "")), {"level": method, **fields})
        return event

    @contextmanager
    def copying_warnings(self) -> Iterator[None]:
        """Write warnings and errors that this process logs with structlog as events too, within the `with` block."""
        before = list(structlog.get_config()["processors"])
        structlog.configure(processors=[self.structlog_processor, *before])
        try:
            yield
        finally:
            structlog.configure(processors=before)

    def close(self) -> None:
        """Close the file; later events are dropped. Idempotent."""
        with self._lock:
            self._is_off = True
            self._writer.close()

    def _append(self, event: str, fields: dict[str, Any]) -> None:
        failed: OSError | None = None
        with self._lock:
            if self._is_off:
                return
            try:
                self._writer.append({"time": round(self._clock(), 3), "event": event, **fields})
            except OSError as error:
                self._is_off, failed = True, error
        if failed is not None:  # logged without the lock, because the log may call this again
            log.warning("event_log_failed", path=str(self._writer.path), error=str(failed))


@converts_arguments
def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run, in order; truncated lines are skipped."""
    return [row for row in read_json_lines(path) if "event" in row]
