"""Checkpoints on their way to the disk."""

from typing import Protocol


class PendingSave(Protocol):
    """A checkpoint on its way to the disk."""

    def wait(self) -> None:
        """Wait until it is whole; any thread may. Can be called twice.

        Raises:
            OSError: The disk would not take it; the directory is no checkpoint.
            CheckpointError: Likewise, where torch said so.
            RoleError: A rank died before it had written its part.
        """
        ...


class SavedTogether:
    """Several saves as one, such as those of a policy and its critic in one checkpoint."""

    def __init__(self, *parts: PendingSave) -> None:
        """Name them."""
        self._parts = parts

    def wait(self) -> None:
        """Wait for all of them, also where one fails; raises what the first that failed raised."""
        errors = [error for part in self._parts if (error := _error_of(part)) is not None]
        if errors:
            raise errors[0]


def _error_of(part: PendingSave) -> Exception | None:
    try:
        part.wait()
    except Exception as error:  # raised when the others have ended
        return error
    return None
