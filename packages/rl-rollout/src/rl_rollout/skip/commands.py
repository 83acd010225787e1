"""The operations of `rl-rollout cache` on a directory of entries: choose, list, verify, prune."""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from rl_core.data import Json
from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files.array_entries import BROKEN, SUFFIX
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

    @property
    def is_broken(self) -> bool:
        """True if the entry can be removed: the store read it, and found it broken."""
        return self.fault is not None and self.fault.is_broken


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


class Removal(Named, frozen=True, kw_only=True):
    """A file that `prune` removes; its name is relative to the directory.

    Attributes:
        why: LEFT, "named", "set aside", "broken" or "oldest".
    """

    why: str


def open_store(directory: str) -> EntryStore:
    """Open the store in an existing directory.

    Raises:
        CacheError: The directory does not exist or is not a folder.
    """
    store = EntryStore(directory)
    if not store.folder.exists():
        raise CacheError(
            f"{directory} must be the folder or URL of a skip cache, as in rollout_cache.directory, with files such as "
            f"{EntryKey(step=1).name}{SUFFIX}."
        )
    return store


def choose_entries(store: EntryStore, directory: str, chosen: Sequence[str]) -> list[EntryKey]:
    """Return the keys of the entries with these names or step numbers.

    Raises:
        CacheError: No entry matches one of them, or several entries belong to the step.
    """
    keys = store.entries()
    found = {text: [key for key in keys if text in (key.name, str(key.step))] for text in chosen}
    for text, matches in found.items():
        if len(matches) != 1:
            names = [key.name for key in matches or keys]
            shown = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
            raise CacheError(
                f"{directory} has {len(matches) or 'no'} entries named {text!r} or of that step. Name one of: {shown}."
            )
    return list(dict.fromkeys(key for (key,) in found.values()))


def list_entries(store: EntryStore, directory: str) -> Listing:
    """Return the contents of a directory without reading any arrays."""
    sizes = store.folder.sizes()
    reports = [report_entry(store, key, size_bytes=sizes.get(key.name, 0)) for key in store.entries()]
    entries = tuple(each for each in reports if each is not None)
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
        size_bytes=sum(each.size_bytes for each in entries) + sum(each.size_bytes for each in (*aside, *leftovers)),
    )


def report_entry(
    store: EntryStore, key: EntryKey, *, size_bytes: int = 0, reads_arrays: bool = False
) -> EntryReport | None:
    """Return the facts or the fault of an entry; None if it was removed in the meantime.

    Args:
        store: Store of the entry.
        key: Its key.
        size_bytes: Size of its file.
        reads_arrays: Check every byte, and not only the description.
    """
    try:
        if reads_arrays:
            store.read(key)
        found = store.describe(key)
    except BrokenEntryError as error:
        fault = Fault(path=error.path, reason=error.reason)
    except CacheError as error:
        fault = Fault(path=store.folder.path_of(key.name), reason=str(error), is_broken=False)
    else:
        if found is None:
            return None
        return EntryReport(
            name=key.name,
            key=key,
            made_at=datetime.fromtimestamp(found.created_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            generate_s=found.generate_s,
            counts=found.counts,
            size_bytes=size_bytes,
            fingerprint=as_plain(found.fingerprint),
        )
    return EntryReport(name=key.name, key=key, size_bytes=size_bytes, fault=fault)


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

    def remove(each: Named | EntryReport, why: str, *, below: str = "") -> None:
        removed.append(Removal(name=below + each.name, size_bytes=each.size_bytes, why=why))
        if not is_dry_run:  # immediately: another process may replace a broken entry
            (store.folder.remove_leftover if why == LEFT else store.folder.remove)(removed[-1].name)

    for leftover in before.leftovers:
        remove(leftover, LEFT)
    for entry in before.entries:
        if entry.key in named:
            remove(entry, "named")
    if is_broken:
        for aside in before.set_aside:
            remove(aside, "set aside", below=f"{BROKEN}/")
        others = [entry for entry in before.entries if entry.key not in named]
        for number, entry in enumerate(others, start=1):
            report = report_entry(store, entry.key, reads_arrays=True)
            on_read(number, len(others))
            if report is not None and report.is_broken:
                remove(entry, "broken")
    if max_bytes is not None:
        broken = {entry.name for entry in before.entries if entry.is_broken}
        gone = {each.name for each in removed}
        for name, size in store.prune(max_bytes, without=gone, is_dry_run=is_dry_run):
            why = "set aside" if name.startswith(BROKEN) else "broken" if name in broken else "oldest"
            removed.append(Removal(name=name, size_bytes=size, why=why))
    return removed


def as_plain(value: Json, *, depth: int = 0) -> Json:
    """Return JSON that any parser accepts: without NaN and infinities, and with a string for what is too deep."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict | list) and depth >= MAX_DEPTH:
        return f"(nested more than {MAX_DEPTH} levels deep)"
    if isinstance(value, dict):
        return {name: as_plain(item, depth=depth + 1) for name, item in value.items()}
    return [as_plain(item, depth=depth + 1) for item in value] if isinstance(value, list) else value
