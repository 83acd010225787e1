"""Work in the background: checkpoints that are being written, and functions in daemon threads."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import TypeVar

Result = TypeVar("Result")


class PendingSave:
    """A checkpoint that is being written."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        """Wrap the function that finishes the checkpoint; None if it is already complete."""
        self._finish = finish
        self._lock = Lock()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the checkpoint is complete. Safe to call from any thread, and twice.

        Raises:
            OSError: Writing failed; the directory is not a checkpoint.
            DiskError: A file cannot be written, for example because the disk is full.
            RoleError: A rank died before it wrote its part.
        """
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish()
                except BaseException as error:
                    self._error = error
            if self._error is not None:
                raise self._error


def saved_together(*parts: PendingSave) -> PendingSave:
    """Combine several saves into one, e.g. those of a policy and its critic in one checkpoint.

    `wait` waits for all of them, even if one fails, and then raises the first error.
    """

    def finish() -> None:
        errors = [error for part in parts if (error := _error_of(part)) is not None]
        if errors:
            raise errors[0]

    return PendingSave(finish)


def _error_of(part: PendingSave) -> Exception | None:
    try:
        part.wait()
    except Exception as error:  # raised after the others end
        return error
    return None


def in_daemon_thread(work: Callable[[], Result], *, name: str) -> Future[Result]:
    """Run work in a daemon thread, which does not keep the process alive as an executor's threads would.

    The returned future cannot be cancelled.
    """
    found: Future[Result] = Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # re-raised by `Future.result`
            found.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return found
