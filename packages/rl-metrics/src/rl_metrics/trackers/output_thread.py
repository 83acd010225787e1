"""Standard output that never blocks a run, even if a terminal is paused (Ctrl-S) or a pipe is not read."""

import atexit
import io
import os
import sys
import threading
from collections import deque

CAPACITY_BYTES = 1 << 20
"""Maximum queued bytes; further writes are dropped."""

DRAIN_S = 2.0
"""Maximum wait for queued writes at the end, in seconds."""


class OutputThread(io.TextIOBase):
    """A text stream whose writes are made by its own thread, in order.

    The next write raises an error of the thread, once. A killed process loses writes that are still queued.
    """

    def __init__(self, descriptor: int, *, encoding: str = "utf-8", errors: str = "strict") -> None:
        """Create a stream on a descriptor, which is never closed.

        Args:
            descriptor: Descriptor of an open file, pipe or terminal.
            encoding: Encoding of the text.
            errors: Handling of characters that the encoding lacks, as in `str.encode`.
        """
        self._descriptor = descriptor
        self._encoding = encoding
        self._errors = errors
        self._changed = threading.Condition()
        self._writes: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the text."""
        return self._encoding

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return True for a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Queue text.

        Raises:
            OSError: An error of the thread, such as a pipe without a reader.
            UnicodeEncodeError: The encoding lacks a character of the text.
        """
        content = text.encode(self._encoding, self._errors)
        with self._changed:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._num_waiting_bytes + len(content) > CAPACITY_BYTES:
                self.num_dropped += 1
                return len(text)
            self._writes.append(content)
            self._num_waiting_bytes += len(content)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="console-output", daemon=True)
                self._thread.start()
                atexit.register(self.drain)
            self._changed.notify_all()
        return len(text)

    def drain(self, deadline_s: float = DRAIN_S) -> bool:
        """Wait until everything is written, or for the deadline; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_waiting_bytes, deadline_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._writes))
                content = self._writes.popleft()
            error = self._written(content)
            with self._changed:
                self._num_waiting_bytes -= len(content)
                self._error = error or self._error
                self._changed.notify_all()

    def _written(self, content: bytes) -> OSError | None:
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            return error
        return None


def unhurried_stdout() -> OutputThread | None:
    """Return standard output through a thread, or None if it has no descriptor, as in a notebook or a test."""
    stream = sys.stdout
    if stream is not sys.__stdout__ or stream is None:
        return None
    try:
        stream.flush()
        return OutputThread(stream.fileno(), encoding=stream.encoding, errors=stream.errors or "strict")
    except (OSError, ValueError):
        return None
