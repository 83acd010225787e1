"""Opens the directory of a skip cache: a local folder, or a prefix in an object store."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rl_core.errors import CacheError, MissingExtraError
from rl_rollout.skip.folder import LocalFiles, LocalFolder, LocalWriter

if TYPE_CHECKING:  # needs fsspec
    from rl_rollout.skip.remote_folder import RemoteFiles, RemoteFolder, RemoteWriter

EntryFolder: TypeAlias = "LocalFolder | RemoteFolder"
"""Storage of entries, by name."""
EntryFiles: TypeAlias = "LocalFiles | RemoteFiles"
"""Reader of one entry's files."""
EntryWriter: TypeAlias = "LocalWriter | RemoteWriter"
"""Writer of one new entry."""


def open_folder(directory: str) -> EntryFolder:
    """Open a local folder, or a URL through fsspec.

    Raises:
        CacheError: The path or URL is invalid.
        MissingExtraError: The directory is a URL, and fsspec or a package for that store is not installed.
    """
    scheme, separator, rest = directory.partition("://")
    if not separator or scheme in ("file", "local"):
        try:
            return LocalFolder(Path(rest if separator else directory).expanduser())
        except RuntimeError as error:
            raise CacheError(f"{directory} cannot be used for a skip cache: {error}") from error
    try:
        from rl_rollout.skip.remote_folder import RemoteFolder
    except ImportError as error:
        raise MissingExtraError(
            "skip caches at a URL need fsspec. Install rl-rollout[skip] as the README says."
        ) from error
    return RemoteFolder(directory)
