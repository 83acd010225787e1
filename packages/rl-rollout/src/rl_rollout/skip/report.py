"""What `rl-rollout cache` finds out: its reports, and the keys of their `--json`."""

import math
from typing import Any

import msgspec

from rl_core.records import Json
from rl_rollout.skip.manifest import Counts, EntryKey

MAX_DEPTH = 32


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why an entry cannot be used.

    Attributes:
        path: Of the file or folder that is not as it must be.
        reason: What it must be, and what it is.
        is_broken: False where the store failed to give it, which says nothing of the entry.
    """

    path: str
    reason: str
    is_broken: bool = True

    @property
    def word(self) -> str:
        """The state in a word."""
        return "BROKEN" if self.is_broken else "UNREADABLE"


class EntryReport(msgspec.Struct, frozen=True, kw_only=True):
    """One entry, as its manifest and the sizes of its files tell it.

    Attributes:
        name: Of its folder.
        key: Which rollouts.
        made_at: UTC, such as "2026-01-31T12:00:00Z"; None of a broken entry.
        generate_s: Seconds that its rollouts took to generate.
        counts: How much it holds.
        size_bytes: Of all its files; of a broken entry what could be listed.
        fingerprint: Of what it was made.
        fault: Why it is broken or cannot be read; None when it is whole.
    """

    name: str
    key: EntryKey
    made_at: str | None = None
    generate_s: float | None = None
    counts: Counts | None = None
    size_bytes: int = 0
    fingerprint: dict[str, Any] | None = None
    fault: Fault | None = None


class StoredBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Something with a size.

    Attributes:
        name: Below the directory.
        size_bytes: Of all its files.
    """

    name: str
    size_bytes: int


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What `ls` says.

    Attributes:
        directory: As it was given.
        entries: Sorted by kind, step and part.
        set_aside: Broken entries that a run moved to broken/.
        leftovers: What writers left that died.
        num_broken: Entries that are broken, or could not be read.
        totals: Of the entries that are not broken.
        size_bytes: Of everything.
    """

    directory: str
    entries: tuple[EntryReport, ...]
    set_aside: tuple[StoredBytes, ...]
    leftovers: tuple[StoredBytes, ...]
    num_broken: int
    totals: Counts
    size_bytes: int


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What became of reading one entry whole.

    Attributes:
        name: Of its folder.
        counts: How much it holds; None of a broken entry.
        fault: Why it is broken; None when every byte is as its manifest says.
    """

    name: str
    counts: Counts | None = None
    fault: Fault | None = None


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` says.

    Attributes:
        directory: As it was given.
        entries: In order.
        num_broken: Of these, those that are broken or could not be read.
    """

    directory: str
    entries: tuple[Verified, ...]
    num_broken: int


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that `prune` removes.

    Attributes:
        name: Below the directory.
        size_bytes: Of all its files.
        why: "left by a writer that died", "named", "set aside", "broken", or "oldest".
    """

    name: str
    size_bytes: int
    why: str


class Pruning(msgspec.Struct, frozen=True, kw_only=True):
    """What `prune` says.

    Attributes:
        directory: As it was given.
        is_dry_run: True when nothing was changed.
        removed: What went, or would go.
        removed_bytes: Of these.
        kept_entries: Entries that stay.
        kept_bytes: Of all that stays.
    """

    directory: str
    is_dry_run: bool
    removed: tuple[Removal, ...]
    removed_bytes: int
    kept_entries: int
    kept_bytes: int


def as_plain(value: Json, *, is_finite: bool = True, depth: int = 0) -> Json:
    """JSON that any reader takes: numbers that JSON does not know become null, and what is nested too deeply a text.

    Args:
        value: What to make plain.
        is_finite: False keeps NaN and infinities, for texts.
        depth: Of the value in what is made plain.
    """
    if is_finite and isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict | list | tuple) and depth >= MAX_DEPTH:
        return f"(nested more than {MAX_DEPTH} deep)"
    if isinstance(value, dict):
        return {str(name): as_plain(item, is_finite=is_finite, depth=depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item, is_finite=is_finite, depth=depth + 1) for item in value]
    return value
