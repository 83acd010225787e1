"""Entries of a rollout cache: their keys, descriptions and rollouts, complete or absent."""

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from rl_core.data import Json
from rl_core.errors import BrokenEntryError, CacheError, DataError, MissingExtraError
from rl_core.files import preview
from rl_core.files.array_entries import BROKEN, FORMAT, Entry, EntryFolder
from rl_core.images import ImageStore
from rl_rollout.rollout import GroupResult
from rl_rollout.skip.rows import DTYPES, Counts, count, decode_groups, decode_images, iter_arrays, storable

MAX_SHOWN = 240
KEY_NAME = re.compile(r"([a-z][a-z_]{0,30})-(\d{8,12})-(\d{4,6})")

Seconds = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]
"""Seconds, also since the epoch, before the year 10000."""


class EntryKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, order=True):
    """Key of an entry's rollouts.

    Attributes:
        kind: Purpose of the rollouts, such as "train" or "validation"; an entry is only replayed for its own kind.
        step: The trainer's step, from 1.
        part: Index from 0 of the generation call within the step.
    """

    step: int
    kind: str = "train"
    part: int = 0

    def __post_init__(self) -> None:
        """Check that a file name can represent the key.

        Raises:
            DataError: kind, step or part is out of range.
        """
        if KEY_NAME.fullmatch(self.name) is None:
            raise DataError(
                "an entry's key needs a kind of at most 31 lowercase letters and underscores, a step from 0 to "
                f"10**12 - 1, and a part from 0 to 10**6 - 1; found {preview((self.kind, self.step, self.part))}."
            )

    @property
    def name(self) -> str:
        """Name of the entry."""
        return f"{self.kind}-{self.step:08d}-{self.part:04d}"

    @classmethod
    def parse(cls, name: str) -> "EntryKey | None":
        """Return the key with this name; None if it is not the name of an entry."""
        match = KEY_NAME.fullmatch(name)
        if match is None:
            return None
        key = cls(kind=match[1], step=int(match[2]), part=int(match[3]))
        return key if key.name == name else None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of an entry's content and origin.

    Attributes:
        key: Key of the rollouts.
        created_at: Creation time in seconds since the epoch.
        generate_s: Generation time of the rollouts in seconds.
        counts: Sizes of the content.
        fingerprint: Fingerprint from `make_fingerprint`.
    """

    key: EntryKey
    created_at: Seconds
    generate_s: Seconds
    counts: Counts
    fingerprint: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """A complete entry.

    Attributes:
        manifest: Its description.
        size_bytes: Size of its file.
        groups: The stored rollouts.
    """

    manifest: Manifest
    size_bytes: int
    groups: tuple[GroupResult, ...]


class EntryStore:
    """Entries in a directory, which any number of processes may share."""

    def __init__(
        self,
        directory: str,
        *,
        compress: bool = True,
        max_entry_bytes: int = 1 << 34,
        images: ImageStore | None = None,
    ) -> None:
        """Set the directory, without reading or creating it.

        Args:
            directory: Local path, or a URL that fsspec supports.
            compress: Compress new entries with lz4.
            max_entry_bytes: Maximum memory of an entry's arrays; a larger one is neither read nor written.
            images: The run's images, which entries carry. None writes none, and keeps none that is read.

        Raises:
            CacheError: The path or URL is invalid.
            MissingExtraError: zarr, fsspec or a package that the URL needs is not installed.
        """
        try:
            self.folder = EntryFolder(directory, max_entry_bytes=max_entry_bytes)
        except MissingExtraError as error:
            raise MissingExtraError(f"{error} Skip caches need the extra rl-rollout[skip].") from error
        self._directory = directory
        self._compress = compress
        self._images = images

    def entries(self) -> list[EntryKey]:
        """Return the keys of all entries, including broken ones, sorted by kind, step and part.

        Raises:
            CacheError: The directory cannot be read, or has entries of an earlier format.
        """
        if old := [name for name in self.folder.others() if EntryKey.parse(name) is not None]:
            raise CacheError(
                f"{self._directory} has entries of format 1, such as {old[0]}; this version reads format {FORMAT}. Use "
                "a new directory, or the commit that wrote them, 226990a0."
            )
        keys = [key for name in self.folder.names() if (key := EntryKey.parse(name)) is not None]
        return sorted(keys, key=lambda key: (key.kind, key.step, key.part))

    def describe(self, key: EntryKey) -> Manifest | None:
        """Read only an entry's description; return None if the entry does not exist.

        Raises:
            BrokenEntryError: It is not an entry, or is torn.
        """
        with self.folder.open(key.name) as entry:
            return None if entry is None else _described(entry, key)

    def read(self, key: EntryKey) -> StoredEntry | None:
        """Read a complete entry and check every byte; return None if it does not exist.

        Raises:
            BrokenEntryError: The entry is invalid or incomplete.
        """
        with self.folder.open(key.name) as entry:
            if entry is None:
                return None
            manifest = _described(entry, key)
            arrays = entry.read(DTYPES)
            groups = decode_groups(arrays, path=entry.path)
            images = decode_images(arrays, groups, path=entry.path)
            if count(groups) != manifest.counts:
                raise BrokenEntryError(entry.path, f"it must have {manifest.counts}; found {count(groups)}")
            if self._images is not None:
                try:
                    for data in images:
                        self._images.put(data)
                except DataError as error:
                    raise BrokenEntryError(f"{entry.path}/images", str(error)) from error
            return StoredEntry(manifest=manifest, size_bytes=entry.size_bytes, groups=tuple(groups))

    def write(
        self,
        key: EntryKey,
        groups: Sequence[GroupResult],
        *,
        fingerprint: dict[str, Json],
        generate_s: float,
        replace: bool = False,
        max_bytes: int | None = None,
    ) -> int | None:
        """Store rollouts as an entry.

        Args:
            key: Key of the new entry.
            groups: Rollouts to store.
            fingerprint: Fingerprint from `make_fingerprint`.
            generate_s: Generation time of the rollouts in seconds.
            replace: Replace an existing entry.
            max_bytes: Maximum size of the stored entry; None sets no limit.

        Returns:
            Size of the new entry in bytes; None if another writer's entry was there first and stays.

        Raises:
            EntryTooLargeError: The entry exceeds `max_bytes`; no part of it remains.
            CacheError: The entry cannot be stored; no part of it remains.
        """
        groups = storable(groups)
        manifest = Manifest(
            key=key,
            created_at=max(time.time(), 0.0),
            generate_s=generate_s,
            counts=count(groups),
            fingerprint=fingerprint,
        )
        return self.folder.write(
            key.name,
            msgspec.to_builtins(manifest),
            iter_arrays(groups, images=self._images),
            compress=self._compress,
            replace=replace,
            max_bytes=max_bytes,
        )

    def created_at(self, key: EntryKey, *, if_broken: float = 0.0) -> float:
        """Return an entry's creation time in seconds since the epoch; 0 if it does not exist."""
        try:
            found = self.describe(key)
        except BrokenEntryError:
            return if_broken
        return 0.0 if found is None else found.created_at

    def prune(
        self, max_bytes: int, *, without: Collection[str] = (), is_dry_run: bool = False
    ) -> list[tuple[str, int]]:
        """Remove items in `broken`, then broken entries, then the oldest ones, until at most `max_bytes` remain.

        Args:
            max_bytes: Maximum size in bytes of all entries and of `broken`.
            without: Names of entries that neither count nor are removed.
            is_dry_run: Remove nothing.

        Returns:
            Name (`broken/NAME` or that of an entry) and size in bytes of each removed item.
        """
        aside, sizes = self.folder.broken(), self.folder.sizes()
        found = [(f"{BROKEN}/{name}", size) for name, size in aside.items()]
        found += [(key.name, sizes.get(key.name, 0)) for key in sorted(self.entries(), key=self.created_at)]
        found = [each for each in found if each[0] not in without]
        excess = sum(size for _, size in found) - max_bytes
        removed = []
        for name, size in found:
            if excess <= 0:
                break
            if not is_dry_run:
                self.folder.remove(name)
            removed.append((name, size))
            excess -= size
        return removed


def _described(entry: Entry, key: EntryKey) -> Manifest:
    try:
        manifest = msgspec.convert(entry.description, Manifest)
    except Exception as error:  # numbers and nesting that strangers chose raise many types
        shown = preview(str(error), most=MAX_SHOWN)[1:-1]
        raise BrokenEntryError(entry.path, f"its description is not one of rollouts ({shown})") from None
    if manifest.key != key:
        raise BrokenEntryError(entry.path, f"it belongs to {manifest.key.name}")
    return manifest
