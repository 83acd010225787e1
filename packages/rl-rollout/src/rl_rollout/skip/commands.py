"""What `rl-rollout cache` does with a directory of entries: list, verify, prune, and find the entry that is meant."""

import os
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from rl_core.errors import BrokenEntryError, CacheError
from rl_rollout.skip.manifest import Counts, EntryKey, Manifest
from rl_rollout.skip.report import (
    EntryReport,
    Fault,
    Listing,
    Pruning,
    Removal,
    StoredBytes,
    Verification,
    Verified,
    as_plain,
)
from rl_rollout.skip.store import EntryStore

NUM_THREADS = 8
MAX_NAMED = 12
COUNTS = ("groups", "sessions", "failed_sessions", "trajectories", "tokens")

OnVerified = Callable[[Verified, int, int], None]
"""Takes what became of an entry, how many were read, and how many there are."""
OnRead = Callable[[int, int], None]
"""Takes how many entries were read, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted:
    """What `prune` removes beside what writers left that died.

    Attributes:
        named: These entries.
        is_broken: Whether broken entries go and what was set aside, even where there is room; reads everything.
        max_bytes: Most that may stay; None leaves what is not unwanted otherwise.
    """

    named: tuple[EntryKey, ...] = ()
    is_broken: bool = False
    max_bytes: int | None = None


def open_store(directory: str) -> EntryStore:
    """The store in a directory that is there.

    Raises:
        CacheError: It is not there, or no folder.
        MissingExtraError: A URL is given, and what it needs is not installed.
    """
    store = EntryStore(directory)
    if not store.entries() and not store.folder.exists():
        raise CacheError(
            f"{directory} must be a folder of a skip cache, or a URL with entries below it; there is nothing. Give "
            "what skip.directory was in the run."
        )
    return store


def some_entries(store: EntryStore, directory: str) -> list[EntryKey]:
    """All entries of a directory.

    Raises:
        CacheError: It has none.
    """
    keys = store.entries()
    if not keys:
        raise CacheError(f"{directory} has no entries; {entries_hint(directory)}")
    return keys


def entries_hint(directory: str) -> str:
    """What entries look like, for who gave a directory without any."""
    upwards = " It is itself an entry: give the folder above." if EntryKey.parse(_last(directory)) else ""
    return f"expected folders such as {EntryKey(step=1).name} with a manifest.json.{upwards}"


def is_entry(text: str) -> bool:
    """Whether a text names an entry, or is a step, rather than a directory of entries."""
    return EntryKey.parse(_last(text)) is not None or (_is_step(text) and not EntryStore(text).folder.exists())


def choose_entry(keys: Sequence[EntryKey], text: str, directory: str) -> EntryKey:
    """The entry that is meant by its name, or by its step.

    Raises:
        CacheError: There is none, or a step has several.
    """
    above = text.rstrip("/").rpartition("/")[0]
    is_here = not above or os.path.normpath(above) == os.path.normpath(directory)
    named = [key for key in keys if is_here and key.name == _last(text)]
    is_step = _is_step(text)
    if not named and is_step:
        named = [key for key in keys if str(key.step) == text.lstrip("0") or (key.step == 0 and not text.strip("0"))]
    if len(named) == 1:
        return named[0]
    if named:
        raise CacheError(f"step {text} has {len(named)} entries in {directory}: {_names(named)}. Name one of them.")
    what = f"step {text}" if is_step else f"entry {text!r}"
    raise CacheError(f"{directory} has no {what}. It has {len(keys)}: {_names(keys)}.")


def newest_entry(store: EntryStore, keys: Sequence[EntryKey]) -> EntryKey:
    """The entry that was made last; of broken ones alone, the first."""
    found = [(manifest.created_at, key) for key in keys if (manifest := _manifest_or_none(store, key)) is not None]
    return max(found, default=(0.0, keys[0]))[1]


def list_entries(store: EntryStore, directory: str) -> Listing:
    """Everything in a directory, without reading the arrays."""
    with ThreadPoolExecutor(NUM_THREADS, "cache-ls") as threads:
        found = [report for report in threads.map(lambda key: describe_entry(store, key), store.entries()) if report]
    aside = tuple(StoredBytes(name=name, size_bytes=size) for name, size in store.folder.set_aside_sizes().items())
    left = tuple(StoredBytes(name=name, size_bytes=size) for name, size in store.folder.leftovers().items())
    counts = [report.counts for report in found if report.counts is not None]
    return Listing(
        directory=directory,
        entries=tuple(found),
        set_aside=aside,
        leftovers=left,
        num_broken=sum(report.fault is not None for report in found),
        totals=Counts(**{name: sum(getattr(each, name) for each in counts) for name in COUNTS}),
        size_bytes=sum(each.size_bytes for each in found) + sum(each.size_bytes for each in (*aside, *left)),
    )


def describe_entry(store: EntryStore, key: EntryKey) -> EntryReport | None:
    """An entry by its manifest and the sizes of its files; None where it is gone meanwhile."""
    size_bytes = 0
    try:
        with store.folder.open(key.name) as files:
            if files is None:
                return None
            size_bytes = sum(files.sizes().values())
        manifest = store.manifest(key)
    except CacheError as error:
        return EntryReport(name=key.name, key=key, size_bytes=size_bytes, fault=fault_of(error, store, key))
    if manifest is None:
        return None
    return EntryReport(
        name=key.name,
        key=key,
        made_at=made_at(manifest),
        generate_s=as_plain(manifest.generate_s),
        counts=manifest.counts,
        size_bytes=size_bytes,
        fingerprint=as_plain(manifest.fingerprint, is_finite=False),
    )


def made_at(manifest: Manifest) -> str | None:
    """When an entry was made; None where that is no time."""
    try:
        return datetime.fromtimestamp(manifest.created_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return None


def verify_entries(
    store: EntryStore, keys: Sequence[EntryKey], directory: str, *, on_verified: OnVerified
) -> Verification:
    """Read entries whole, every byte checked; changes nothing."""
    verified: list[Verified] = []
    for key in keys:
        try:
            entry = store.read(key)
        except CacheError as error:
            verified.append(Verified(name=key.name, fault=fault_of(error, store, key)))
        else:
            if entry is None:
                gone = Fault(path=store.folder.path_of(key.name), reason="it was removed meanwhile")
                verified.append(Verified(name=key.name, fault=gone))
            else:
                verified.append(Verified(name=key.name, counts=entry.manifest.counts))
        on_verified(verified[-1], len(verified), len(keys))
    num_broken = sum(each.fault is not None for each in verified)
    return Verification(directory=directory, entries=tuple(verified), num_broken=num_broken)


def prune_entries(
    store: EntryStore, directory: str, unwanted: Unwanted, *, is_dry_run: bool, on_read: OnRead
) -> Pruning:
    """Remove what writers left that died, then entries by name, then broken ones, then the oldest; each whole.

    Args:
        store: Of the directory.
        directory: As it was given.
        unwanted: What goes.
        is_dry_run: Whether to change nothing.
        on_read: Told of each entry that was read to find out whether it is broken.

    Raises:
        CacheError: The directory cannot be read, or something cannot be removed.
        MissingExtraError: Broken entries are to be found, and zarr is not installed; nothing was removed.
    """
    before = list_entries(store, directory)
    if unwanted.is_broken and before.entries:
        store.require_library()
    removed: dict[str, Removal] = {}
    for each in _unwanted(store, before, unwanted, on_read):
        if not is_dry_run:  # at once: what was found to be broken may be replaced by another process
            _remove(store, each)
        removed[each.name] = each
    if unwanted.max_bytes is not None:
        most = unwanted.max_bytes
        oldest = _planned(store, most, without=removed) if is_dry_run else store.prune(most)
        for name, size in oldest:
            removed.setdefault(name, Removal(name=name, size_bytes=size, why=_why(name, before)))
    removed_bytes = sum(each.size_bytes for each in removed.values())
    return Pruning(
        directory=directory,
        is_dry_run=is_dry_run,
        removed=tuple(removed.values()),
        removed_bytes=removed_bytes,
        kept_entries=sum(entry.name not in removed for entry in before.entries),
        kept_bytes=before.size_bytes - removed_bytes,
    )


def fault_of(error: CacheError, store: EntryStore, key: EntryKey) -> Fault:
    """Which place is at fault, and why."""
    if isinstance(error, BrokenEntryError):
        return Fault(path=error.path, reason=error.reason)
    return Fault(path=store.folder.path_of(key.name), reason=str(error), is_broken=False)


def _unwanted(store: EntryStore, listing: Listing, unwanted: Unwanted, on_read: OnRead) -> Iterator[Removal]:
    """All but the oldest; each entry is read as its turn comes."""
    for each in listing.leftovers:
        yield Removal(name=each.name, size_bytes=each.size_bytes, why="left by a writer that died")
    for entry in listing.entries:
        if entry.key in unwanted.named:
            yield Removal(name=entry.name, size_bytes=entry.size_bytes, why="named")
    if not unwanted.is_broken:
        return
    for each in listing.set_aside:
        yield Removal(name=f"broken/{each.name}", size_bytes=each.size_bytes, why="set aside")
    others = [entry for entry in listing.entries if entry.key not in unwanted.named]
    for number, entry in enumerate(others, start=1):
        is_broken = _is_broken(store, entry.key)
        on_read(number, len(others))
        if is_broken:
            yield Removal(name=entry.name, size_bytes=entry.size_bytes, why="broken")


def _planned(store: EntryStore, max_bytes: int, *, without: Container[str]) -> Iterator[tuple[str, int]]:
    """What the store would remove for the rest to fit, if the others were gone."""
    rest = [each for each in store.prune(-1, dry_run=True) if each[0] not in without]
    total = sum(size for _, size in rest)
    for name, size in rest:
        if total <= max_bytes:
            return
        yield name, size
        total -= size


def _why(name: str, listing: Listing) -> str:
    """Why something went for the rest to fit: what is known to be broken goes before the oldest."""
    if name.startswith("broken/"):
        return "set aside"
    broken = (entry.name for entry in listing.entries if entry.fault is not None and entry.fault.is_broken)
    return "broken" if name in broken else "oldest"


def _is_broken(store: EntryStore, key: EntryKey) -> bool:
    """Read it whole; what a store cannot give now is not broken, nor what is gone."""
    try:
        store.read(key)
    except BrokenEntryError:
        return True
    except CacheError:
        return False
    return False


def _remove(store: EntryStore, removal: Removal) -> None:
    if removal.why == "set aside":
        store.folder.remove_set_aside(removal.name.removeprefix("broken/"))
    elif removal.why in ("named", "broken"):
        store.folder.remove(removal.name)
    else:
        store.folder.remove_leftover(removal.name)


def _manifest_or_none(store: EntryStore, key: EntryKey) -> Manifest | None:
    try:
        return store.manifest(key)
    except CacheError:
        return None


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _names(keys: Sequence[EntryKey]) -> str:
    names = [key.name for key in keys[:MAX_NAMED]]
    return ", ".join([*names, f"and {len(keys) - MAX_NAMED} more"] if len(keys) > MAX_NAMED else names)
