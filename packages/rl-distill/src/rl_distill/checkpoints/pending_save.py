"""Checkpoints on their way to the disk."""

from collections.abc import Callable
from threading import Lock


class PendingSave:
    """A checkpoint on its way to the disk."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        """Say what finishes it; None where it is complete already."""
        self._finish = finish
        self._lock = Lock()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Wait until it is complete; any thread may. Can be called twice.

        Raises:
            OSError: The disk would not take it; the directory is no checkpoint.
            CheckpointError: Likewise, where torch said so.
            RoleError: A rank died before it had written its part.
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
    """Several saves as one, such as those of a policy and its critic in one checkpoint.

    All of them are waited for, also where one fails; what the first that failed raised is raised.
    """

    def finish() -> None:
        errors = [error for part in parts if (error := _error_of(part)) is not None]
        if errors:
            raise errors[0]

    return PendingSave(finish)


def _error_of(part: PendingSave) -> Exception | None:
    try:
        part.wait()
    except Exception as error:  # raised when the others have ended
        return error
    return None
