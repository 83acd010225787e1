"""Which place a directory's name means: a folder of a local disk, or a place on an object store."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rl_core.errors import CacheError, MissingExtraError
from rl_rollout.skip.folder import LocalFiles, LocalFolder, LocalWriter

if TYPE_CHECKING:  # it needs fsspec
    from rl_rollout.skip.remote_folder import RemoteFiles, RemoteFolder, RemoteWriter

EntryFolder: TypeAlias = "LocalFolder | RemoteFolder"
"""Entries by name."""
EntryFiles: TypeAlias = "LocalFiles | RemoteFiles"
"""The files of one entry, to be read."""
EntryWriter: TypeAlias = "LocalWriter | RemoteWriter"
"""An entry that is being made."""


def open_folder(directory: str) -> EntryFolder:
    """A local folder, or through fsspec a place on an object store.

    Raises:
        CacheError: It cannot be read or made.
        MissingExtraError: A URL is given, and fsspec or what it needs is not installed.
    """
    scheme, separator, rest = directory.partition("://")
    if not separator or scheme in ("file", "local"):
        try:
            return LocalFolder(Path(rest if separator else directory).expanduser())
        except RuntimeError as error:
            raise CacheError(f"{directory} is no place for a skip cache: {error}") from error
    try:
        from rl_rollout.skip.remote_folder import RemoteFolder
    except ImportError as error:
        raise MissingExtraError(
            "skip caches at a URL need fsspec. Install rl-rollout[skip] as the README says."
        ) from error
    return RemoteFolder(directory)
