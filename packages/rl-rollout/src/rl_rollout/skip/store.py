"""Entries of a rollout cache in a folder on disk or at a URL, written atomically and read only if complete."""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Json
from rl_core.errors import BrokenEntryError, CacheError, MissingExtraError
from rl_core.files import preview, preview_path
from rl_core.files.zarr_arrays import METADATA, ArraySpec, check_sizes, decode_array, encode_array, plan_array
from rl_rollout.rollout import GroupResult
from rl_rollout.skip.folder import BROKEN, LocalFiles, LocalFolder, LocalWriter
from rl_rollout.skip.manifest import (
    ARRAYS_FOLDER,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TOKEN_BYTES,
    EntryKey,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from rl_rollout.skip.rows import DTYPES, count, decode_groups, iter_arrays, storable

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


NUM_READS, NUM_WRITES = 4, 8
"""Number of arrays read or written in parallel; writes mostly wait for the disk."""
ReadT = TypeVar("ReadT")


class EntryTooLargeError(CacheError):
    """An entry would exceed the maximum size of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """A complete entry.

    Attributes:
        manifest: The entry's manifest.
        groups: The stored rollouts.
    """

    manifest: Manifest
    groups: tuple[GroupResult, ...]


class EntryStore:
    """Entries in a directory, which any number of processes may share."""

    def __init__(self, directory: str, *, compress: bool = True, max_entry_bytes: int = 1 << 34) -> None:
        """Set the directory, without reading or creating it.

        Args:
            directory: Local path, or a URL that fsspec supports.
            compress: Compress new entries with lz4.
            max_entry_bytes: Maximum memory of an entry's arrays; a larger one is neither read nor written.
        """
        self.folder: EntryFolder = open_folder(directory)
        self._compress = compress
        self._max_entry_bytes = max_entry_bytes

    def require_library(self) -> None:
        """Check early that zarr's codecs are installed.

        Raises:
            MissingExtraError: They are not installed.
        """
        sample = np.zeros(1, dtype=np.uint8)
        with _needing_codecs():
            encode_array(sample, plan_array(sample, compress=True))

    def entries(self) -> list[EntryKey]:
        """Return the keys of all entries, including broken ones, sorted by kind, step and part."""
        keys = [key for name in self.folder.names() if (key := EntryKey.parse(name)) is not None]
        return sorted(keys, key=lambda key: (key.kind, key.step, key.part))

    def manifest(self, key: EntryKey) -> Manifest | None:
        """Read only an entry's manifest; return None if the entry does not exist.

        Raises:
            BrokenEntryError: The manifest is invalid, or the files do not match it.
        """
        return self._whole(key, lambda files: self._read_manifest(files, key, files.sizes()))

    def read(self, key: EntryKey) -> StoredEntry | None:
        """Read a complete entry and check every byte; return None if it does not exist.

        Raises:
            BrokenEntryError: The entry is invalid or incomplete.
            MissingExtraError: zarr's codecs are not installed.
        """
        read = self._whole(key, lambda files: self._read_arrays(files, key))
        if read is None:
            return None
        (manifest, arrays), path = read, self.folder.path_of(key.name)
        groups = decode_groups(arrays, path=path)
        if count(groups) != manifest.counts:
            raise BrokenEntryError(path, f"it must have {manifest.counts}, as in its manifest; found {count(groups)}")
        return StoredEntry(manifest=manifest, groups=tuple(groups))

    def write(
        self,
        key: EntryKey,
        groups: Sequence[GroupResult],
        *,
        fingerprint: dict[str, Json],
        generate_s: float,
        replace: bool = False,
        max_bytes: int | None = None,
    ) -> Manifest | None:
        """Store rollouts as an entry.

        Args:
            key: Key of the new entry.
            groups: Rollouts to store.
            fingerprint: Fingerprint from `make_fingerprint`.
            generate_s: Generation time of the rollouts in seconds.
            replace: Replace an existing entry.
            max_bytes: Maximum size of the stored entry; None sets no limit.

        Returns:
            The new entry's manifest; None if another writer's entry was there first and stays.

        Raises:
            EntryTooLargeError: The entry exceeds `max_bytes`; no partial entry remains.
            CacheError: The entry cannot be stored; no partial entry remains.
            MissingExtraError: zarr's codecs are not installed.
        """
        arrays_folder = f"arrays-{secrets.token_hex(TOKEN_BYTES)}"
        groups = storable(groups)
        with self.folder.begin(key.name) as writer:
            with ThreadPoolExecutor(NUM_WRITES, "skip-cache") as threads:
                writes = {
                    name: threads.submit(self._write_array, writer, f"{arrays_folder}/{name}", array)
                    for name, array in self._bounded(iter_arrays(groups), key)
                }
            manifest = Manifest(
                format=FORMAT,
                format_version=FORMAT_VERSION,
                key=key,
                created_at=max(time.time(), 0.0),
                generate_s=generate_s,
                counts=count(groups),
                fingerprint=fingerprint,
                arrays_folder=arrays_folder,
                arrays={name: write.result() for name, write in writes.items()},
            )
            raw = encode_manifest(manifest)
            if max_bytes is not None and manifest.size_bytes + len(raw) > max_bytes:
                raise EntryTooLargeError(f"{key.name} would exceed max_bytes = {max_bytes}; it was not stored.")
            return manifest if writer.publish(raw, replace=replace) else None

    def _bounded(self, arrays: Iterable[tuple[str, NDArray[Any]]], key: EntryKey) -> Iterator[tuple[str, NDArray[Any]]]:
        total = 0
        for name, array in arrays:
            total += array.nbytes
            if total > self._max_entry_bytes:
                raise CacheError(
                    f"rollouts of {key.name} need {total} bytes or more; an entry has at most "
                    f"{self._max_entry_bytes}. Exclude the step from rollout_cache.steps, or disable the cache."
                )
            yield name, array

    def _write_array(self, writer: EntryWriter, stem: str, array: NDArray[Any]) -> ArraySpec:
        with _needing_codecs():
            spec, files = encode_array(array, plan_array(array, compress=self._compress))
        for file, parts in files.items():
            writer.write(f"{stem}/{file}", *parts)
        return spec

    def prune(self, max_bytes: int, *, keep: EntryKey | None = None) -> list[tuple[str, int]]:
        """Remove items in `broken`, then the oldest entries, until at most `max_bytes` remain.

        Args:
            max_bytes: Maximum size in bytes of all entries and of `broken`.
            keep: Entry to keep whatever its age, such as the one just stored.

        Returns:
            Name and size in bytes of each removed item.
        """
        found = self.by_age()
        total = sum(size for _, size in found)
        removed: list[tuple[str, int]] = []
        for name, size in found:
            if total <= max_bytes:
                break
            if keep is None or name != keep.name:
                self.remove(name)
                removed.append((name, size))
                total -= size
        return removed

    def by_age(self) -> list[tuple[str, int]]:
        """Return name and size in bytes of each item in `broken` (`broken/NAME`), then of each entry, oldest first."""
        aside = [(f"{BROKEN}/{name}", size) for name, size in self.folder.set_aside_sizes().items()]
        return aside + [(key.name, size) for _, size, key in sorted(self._ages(), key=lambda entry: entry[0])]

    def remove(self, name: str) -> None:
        """Remove an entry or an item in `broken`, by its name from `by_age`."""
        folder, _, rest = name.rpartition("/")
        if folder:
            self.folder.remove_set_aside(rest)
        else:
            self.folder.remove(name)

    def _ages(self) -> Iterator[tuple[float, int, EntryKey]]:
        """Yield each entry's creation time, size in bytes and key; a broken entry counts as the oldest."""
        for key in self.entries():
            size_bytes = 0
            try:
                size_bytes = self._whole(key, lambda files: sum(files.sizes().values())) or 0
                manifest = self.manifest(key)
            except BrokenEntryError:
                yield 0.0, size_bytes, key
            else:
                if manifest is not None:
                    yield manifest.created_at, size_bytes, key

    def _whole(self, key: EntryKey, read: Callable[[EntryFiles], ReadT]) -> ReadT | None:
        """Read from an entry, again if it was replaced in the meantime; return None if it does not exist."""
        while True:
            with self.folder.open(key.name) as files:
                if files is None:
                    return None
                try:
                    return read(files)
                except BrokenEntryError:
                    if files.is_current():
                        raise

    def _read_arrays(self, files: EntryFiles, key: EntryKey) -> tuple[Manifest, dict[str, NDArray[Any]]]:
        path = self.folder.path_of(key.name)
        manifest = self._read_manifest(files, key, files.sizes())
        with ThreadPoolExecutor(NUM_READS, "skip-cache") as threads:
            reads = [threads.submit(_read_array, files, name, manifest, path) for name in manifest.arrays]
            return manifest, {name: each.result() for name, each in zip(manifest.arrays, reads, strict=True)}

    def _read_manifest(self, files: EntryFiles, key: EntryKey, sizes: dict[str, int]) -> Manifest:
        path = self.folder.path_of(key.name)
        where = f"{path}/{MANIFEST}"
        size = sizes.get(MANIFEST)
        if size is None:
            raise BrokenEntryError(where, "it is missing; the entry is incomplete")
        if size > MAX_MANIFEST_BYTES:
            raise BrokenEntryError(where, f"it has {size} bytes; expected at most {MAX_MANIFEST_BYTES}")
        manifest = decode_manifest(bytes(files.read(MANIFEST, size)), path=where)
        if manifest.key != key:
            raise BrokenEntryError(where, f"it belongs to {preview(manifest.key.name)}")
        self._check(manifest, sizes, path=path)
        return manifest

    def _check(self, manifest: Manifest, sizes: dict[str, int], *, path: str) -> None:
        """Check names, dtypes and sizes of the arrays and their files before reading any of them."""
        if ARRAYS_FOLDER.fullmatch(manifest.arrays_folder) is None:
            raise BrokenEntryError(
                path, f"its arrays are in {preview(manifest.arrays_folder)}; expected arrays-<16 digits>"
            )
        total = 0
        for name, spec in manifest.arrays.items():
            if name not in DTYPES or spec.dtype != DTYPES[name]:
                known = ", ".join(f"{known} ({dtype})" for known, dtype in DTYPES.items())
                raise BrokenEntryError(
                    path, f"it has the array {preview(name)} of {preview(spec.dtype)}; known: {known}"
                )
            total += spec.shape[0] * np.dtype(spec.dtype).itemsize
            if total > self._max_entry_bytes:
                raise BrokenEntryError(path, f"its arrays need {total} bytes; the limit is {self._max_entry_bytes}")
            check_sizes(spec, path=f"{path}/{name}")
        expected = {file: spec.size_bytes for file, spec in manifest.files().items()}
        stem = f"{manifest.arrays_folder}/"
        found = {file: size for file, size in sizes.items() if file.startswith(stem)}
        for file in sorted(expected.keys() | found.keys()):
            if expected.get(file) != found.get(file):
                raise BrokenEntryError(
                    f"{path}/{preview_path(file)}",
                    f"it must {_shown_size(expected.get(file))}; it {_shown_size(found.get(file), is_found=True)}",
                )


def _read_array(files: EntryFiles, name: str, manifest: Manifest, path: str) -> NDArray[Any]:
    spec, stem = manifest.arrays[name], f"{manifest.arrays_folder}/{name}"
    content = {METADATA: files.read(f"{stem}/{METADATA}", spec.metadata.size_bytes)}
    for index, chunk in enumerate(spec.chunks):
        content[f"c/{index}"] = files.read(f"{stem}/c/{index}", chunk.size_bytes)
    with _needing_codecs():
        return decode_array(content, spec, path=f"{path}/{stem}")


@contextmanager
def _needing_codecs() -> Iterator[None]:
    """Name this package's extra in the error about missing codecs."""
    try:
        yield
    except MissingExtraError as error:
        raise MissingExtraError(
            "skip caches need zarr's codecs. Install rl-rollout[skip] as the README says."
        ) from error


def _shown_size(size: int | None, *, is_found: bool = False) -> str:
    if size is None:
        return "is missing" if is_found else "not exist"
    return f"has {size} bytes" if is_found else f"have {size} bytes"
