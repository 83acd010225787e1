"""The operations of `rl-rollout cache` on a directory of entries: choose, list, verify, prune."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from rl_core.data import Json
from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files.array_entries import SUFFIX
from rl_rollout.skip.entries import EntryKey, EntryStore
from rl_rollout.skip.rows import Counts

MAX_NAMED = 12
MAX_DEPTH = 32
LEFT = "left by a writer that died"

OnRead = Callable[[int, int], None]
"""Receives the number of entries read so far and the total."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why an entry cannot be used.

    Attributes:
        path: The file at fault.
        reason: What was expected and what was found.
        is_broken: False if the store failed to read the entry, which may itself be intact.
    """

    path: str
    reason: str
    is_broken: bool = True

    @property
    def word(self) -> str:
        """The state as one word."""
        return "BROKEN" if self.is_broken else "UNREADABLE"


class EntryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one entry, from its description and its size.

    Attributes:
        name: Name of the entry.
        key: Key of its rollouts.
        made_at: Creation time in UTC, such as "2026-01-31T12:00:00Z"; None for a broken entry.
        generate_s: Generation time of its rollouts in seconds.
        counts: Numbers of groups, sessions, trajectories and tokens.
        size_bytes: Size of its file.
        fingerprint: Fingerprint of its origin.
        fault: Why it is broken or cannot be read; None if it is complete.
    """

    name: str
    key: EntryKey
    made_at: str | None = None
    generate_s: float | None = None
    counts: Counts | None = None
    size_bytes: int = 0
    fingerprint: dict[str, Any] | None = None
    fault: Fault | None = None


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A file besides the entries.

    Attributes:
        name: Its name.
        size_bytes: Its size in bytes.
    """

    name: str
    size_bytes: int


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a directory; its fields are those of `ls --json`.

    Attributes:
        directory: The directory as the user gave it.
        entries: Entries, sorted by kind, step and part.
        set_aside: Broken entries that a run moved to broken/.
        leftovers: Leftovers of dead writers.
        num_broken: Number of entries that are broken or could not be read.
        totals: Sums over all entries except the broken ones.
        size_bytes: Total size of the directory's contents in bytes.
    """

    directory: str
    entries: tuple[EntryReport, ...]
    set_aside: tuple[Named, ...]
    leftovers: tuple[Named, ...]
    num_broken: int
    totals: Counts
    size_bytes: int


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that `prune` removes.

    Attributes:
        name: Path relative to the directory.
        size_bytes: Size of its file.
        why: LEFT, "named", "set aside", "broken" or "oldest".
    """

    name: str
    size_bytes: int
    why: str


def open_store(directory: str, *, needs_entries: bool = False) -> tuple[EntryStore, list[EntryKey]]:
    """Open the store in an existing directory, and return it with the keys of its entries.

    Raises:
        CacheError: The directory does not exist or is not a folder, or has no entries although it needs them.
    """
    store = EntryStore(directory)
    if not store.folder.exists():
        raise CacheError(
            f"{directory} must be the folder or URL of a skip cache, such as the rollout_cache.directory of a run; "
            f"{entries_hint(directory)}"
        )
    keys = store.entries()
    if needs_entries and not keys:
        raise CacheError(f"{directory} has no entries; {entries_hint(directory)}")
    return store, keys


def entries_hint(directory: str) -> str:
    """Return a hint on what entries look like, for a directory that has none."""
    is_entry = EntryKey.parse(_last(directory)) is not None
    upwards = " The path is itself an entry: give its folder." if is_entry else ""
    return f"expected files such as {EntryKey(step=1).name}{SUFFIX}.{upwards}"


def choose_entry(keys: Sequence[EntryKey], text: str, directory: str) -> EntryKey:
    """Return the key of the entry with a name or step number.

    Raises:
        CacheError: No entry matches, or several entries belong to the step.
    """
    above = text.rstrip("/").rpartition("/")[0]
    is_here = not above or os.path.normpath(above) == os.path.normpath(directory)
    named = [key for key in keys if is_here and key.name == _last(text)]
    is_step = text.isascii() and text.isdecimal()
    if not named and is_step:
        named = [key for key in keys if str(key.step) == (text.lstrip("0") or "0")]
    if len(named) == 1:
        return named[0]
    if named:
        raise CacheError(f"step {text} has {len(named)} entries in {directory}: {_names(named)}. Name one of them.")
    what = f"step {text}" if is_step else f"entry {text!r}"
    raise CacheError(f"{directory} has no {what}. It has {len(keys)}: {_names(keys)}.")


def list_entries(store: EntryStore, directory: str) -> Listing:
    """Return the contents of a directory without reading any arrays."""
    sizes = store.folder.sizes()
    entries = tuple(
        found for key in store.entries() if (found := describe_entry(store, key, sizes.get(key.name, 0))) is not None
    )
    aside, leftovers = (
        tuple(Named(name=name, size_bytes=size) for name, size in found.items())
        for found in (store.folder.broken(), store.folder.leftovers())
    )
    held = [entry.counts for entry in entries if entry.counts is not None]
    return Listing(
        directory=directory,
        entries=entries,
        set_aside=aside,
        leftovers=leftovers,
        num_broken=sum(entry.fault is not None for entry in entries),
        totals=Counts(**{name: sum(getattr(each, name) for each in held) for name in Counts.__struct_fields__}),
        size_bytes=sum(entry.size_bytes for entry in entries) + sum(each.size_bytes for each in (*aside, *leftovers)),
    )


def describe_entry(store: EntryStore, key: EntryKey, size_bytes: int) -> EntryReport | None:
    """Summarize an entry from its description; return None if it was removed in the meantime."""
    try:
        found = store.describe(key)
    except CacheError as error:
        return EntryReport(name=key.name, key=key, size_bytes=size_bytes, fault=_fault_of(error, store, key))
    if found is None:
        return None
    manifest = found.manifest
    return EntryReport(
        name=key.name,
        key=key,
        made_at=_made_at(manifest.created_at),
        generate_s=manifest.generate_s,
        counts=manifest.counts,
        size_bytes=found.size_bytes,
        fingerprint=as_plain(manifest.fingerprint),
    )


def verify_entry(store: EntryStore, key: EntryKey) -> EntryReport:
    """Read a complete entry, check every byte, and return its counts or its fault."""
    try:
        entry = store.read(key)
    except CacheError as error:
        return EntryReport(name=key.name, key=key, fault=_fault_of(error, store, key))
    if entry is None:
        gone = Fault(path=store.folder.path_of(key.name), reason="it was removed in the meantime", is_broken=False)
        return EntryReport(name=key.name, key=key, fault=gone)
    return EntryReport(name=key.name, key=key, counts=entry.manifest.counts)


def prune_entries(
    store: EntryStore,
    before: Listing,
    *,
    named: Sequence[EntryKey] = (),
    is_broken: bool = False,
    max_bytes: int | None = None,
    is_dry_run: bool,
    on_read: OnRead,
) -> list[Removal]:
    """Remove leftovers of dead writers, then named entries, broken entries and the oldest entries.

    Args:
        store: Store of the directory.
        before: Contents of the directory.
        named: Entries to remove.
        is_broken: Also remove broken entries and everything in broken/, whatever the size; this reads all entries.
        max_bytes: Maximum size of what remains; None sets no limit.
        is_dry_run: Report the removals without performing them.
        on_read: Called after each entry that is checked for damage.

    Returns:
        The removals in order; with `is_dry_run`, those that would be performed.

    Raises:
        CacheError: The directory cannot be read, or an item cannot be removed.
    """
    removed: list[Removal] = []

    def remove(removal: Removal) -> None:
        removed.append(removal)
        if not is_dry_run:  # immediately: another process may replace a broken entry
            (store.folder.remove_leftover if removal.why == LEFT else store.folder.remove)(removal.name)

    for removal in _unwanted(store, before, named, is_broken, on_read):
        remove(removal)
    if max_bytes is not None:
        gone = {each.name for each in removed}
        broken = {entry.name for entry in before.entries if entry.fault is not None and entry.fault.is_broken}
        rest = [each for each in store.by_age() if each[0] not in gone]
        total = sum(size for _, size in rest)
        for name, size in rest:
            if total <= max_bytes:
                break
            why = "set aside" if name.startswith("broken/") else "broken" if name in broken else "oldest"
            remove(Removal(name=name, size_bytes=size, why=why))
            total -= size
    return removed


def as_plain(value: Json, *, is_finite: bool = False, depth: int = 0) -> Json:
    """Return JSON that any parser accepts: values nested too deeply become a string.

    Args:
        value: A JSON value.
        is_finite: Replace NaN and infinities, which JSON lacks, by null.
        depth: Nesting depth of the value, from 0.
    """
    if is_finite and isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict | list | tuple) and depth >= MAX_DEPTH:
        return f"(nested more than {MAX_DEPTH} levels deep)"
    if isinstance(value, dict):
        return {str(name): as_plain(item, is_finite=is_finite, depth=depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item, is_finite=is_finite, depth=depth + 1) for item in value]
    return value


def _unwanted(
    store: EntryStore, listing: Listing, named: Sequence[EntryKey], is_broken: bool, on_read: OnRead
) -> Iterator[Removal]:
    """Yield all removals except those of the oldest entries. Each entry is read only when it is reached."""
    for each in listing.leftovers:
        yield Removal(name=each.name, size_bytes=each.size_bytes, why=LEFT)
    for entry in listing.entries:
        if entry.key in named:
            yield Removal(name=entry.name, size_bytes=entry.size_bytes, why="named")
    if not is_broken:
        return
    for each in listing.set_aside:
        yield Removal(name=f"broken/{each.name}", size_bytes=each.size_bytes, why="set aside")
    others = [entry for entry in listing.entries if entry.key not in named]
    for number, entry in enumerate(others, start=1):
        fault = verify_entry(store, entry.key).fault
        on_read(number, len(others))
        if fault is not None and fault.is_broken:
            yield Removal(name=entry.name, size_bytes=entry.size_bytes, why="broken")


def _fault_of(error: CacheError, store: EntryStore, key: EntryKey) -> Fault:
    if isinstance(error, BrokenEntryError):
        return Fault(path=error.path, reason=error.reason)
    return Fault(path=store.folder.path_of(key.name), reason=str(error), is_broken=False)


def _made_at(seconds: float) -> str | None:
    """Return a creation time in UTC; None if it is out of range."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return None


def _last(path: str) -> str:
    """Return the name of an entry from its path."""
    return path.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX)


def _names(keys: Sequence[EntryKey]) -> str:
    names = [key.name for key in keys[:MAX_NAMED]]
    return ", ".join([*names, f"and {len(keys) - MAX_NAMED} more"] if len(keys) > MAX_NAMED else names)
