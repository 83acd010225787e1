"""What a place of entries does, on a local disk or an object store."""

from contextlib import AbstractContextManager
from typing import Protocol


class EntryFiles(Protocol):
    """The files of one entry, to be read."""

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by its path in the entry.

        Raises:
            BrokenEntryError: There is a link, a device, or too much.
        """
        ...

    def read(self, path: str, size_bytes: int) -> memoryview:
        """A whole file, in memory that is the caller's to change.

        Raises:
            BrokenEntryError: It is missing, no plain file, or of another size.
        """
        ...

    def is_current(self) -> bool:
        """False when the entry was removed or replaced since it was opened: what it lacks then says nothing of it."""
        ...


class EntryWriter(Protocol):
    """An entry that is being made."""

    def write(self, path: str, *parts: bytes | memoryview) -> None:
        """Add a file of these parts; several threads may do so at once."""
        ...

    def publish(self, manifest: bytes, *, replace: bool) -> bool:
        """Give the entry its manifest and its place, all at once.

        Args:
            manifest: Written last.
            replace: Whether it takes the place of an entry of this name.

        Returns:
            False where another one was there first, which stays.
        """
        ...


class EntryFolder(Protocol):
    """Entries by name."""

    def path_of(self, name: str) -> str:
        """Where an entry is, for people."""
        ...

    def exists(self) -> bool:
        """True when there is a folder, or on an object store anything below its URL."""
        ...

    def names(self) -> list[str]:
        """Names of what is, or claims to be, an entry; sorted."""
        ...

    def open(self, name: str) -> AbstractContextManager[EntryFiles | None]:
        """An entry's files; None where there is no such entry.

        Raises:
            BrokenEntryError: It is a link, or no folder.
        """
        ...

    def begin(self, name: str) -> AbstractContextManager[EntryWriter]:
        """A new entry; nothing of it stays where it is not published.

        Raises:
            CacheError: It cannot be written.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove an entry, at once for all readers; nothing where it is gone."""
        ...

    def set_aside(self, name: str) -> str | None:
        """Move an entry out of the way; gives where it is now, or None where it is gone."""
        ...

    def set_aside_sizes(self) -> dict[str, int]:
        """Bytes of what was set aside, by name."""
        ...

    def remove_set_aside(self, name: str) -> None:
        """Remove what was set aside."""
        ...

    def check(self) -> None:
        """Find out whether there can be such a folder, before anything is made.

        Raises:
            CacheError: There can not.
        """
        ...

    def prepare(self) -> None:
        """Make the folder where it is not there, and sweep it.

        Raises:
            CacheError: It cannot be made or written.
        """
        ...

    def sweep(self) -> None:
        """Remove what writers left that died, where that is found out at once."""
        ...

    def leftovers(self) -> dict[str, int]:
        """Bytes of what writers left that died, by name."""
        ...

    def remove_leftover(self, name: str) -> None:
        """Remove what a writer left that died."""
        ...
