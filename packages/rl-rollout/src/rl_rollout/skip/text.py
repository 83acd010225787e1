"""Formats the results of `rl-rollout cache` for a terminal, with control characters in entries escaped."""

import json
from collections.abc import Iterable, Iterator, Sequence

from rl_core.data import Json
from rl_core.terminal_text import bytes_text, printable, table_lines
from rl_rollout.skip.commands import EntryReport, Fault, Listing, Named, Removal, entries_hint
from rl_rollout.skip.rows import Counts

COLUMNS = (
    "entry",
    "made at (UTC)",
    "groups",
    "sessions",
    "failed",
    "trajectories",
    "tokens",
    "size",
    "generated in",
    "policy",
    "state",
)
RIGHT = frozenset({"groups", "sessions", "failed", "trajectories", "tokens", "size", "generated in"})
MAX_REASON = 240
DIGEST_DIGITS = 12


def listing_text(listing: Listing) -> str:
    """Return the table of `ls` and its totals."""
    rows = [_row(entry) for entry in listing.entries]
    lines = [*table_lines(COLUMNS, rows, right=RIGHT), ""] if listing.entries else []
    lines += [f"{entry.fault.word} {entry.name}: {_fault(entry.fault)}" for entry in listing.entries if entry.fault]
    num_whole = len(listing.entries) - listing.num_broken
    broken = f", {listing.num_broken} broken" if listing.num_broken else ""
    lines.append(
        f"{_counted(num_whole, 'entry', 'entries')}{broken}: {_held(listing.totals)}; "
        f"{bytes_text(listing.size_bytes)} in all"
        if listing.entries
        else f"no entries in {printable(listing.directory, width=None)}; "
        f"{printable(entries_hint(listing.directory), width=None)}"
    )
    if num_whole:
        lines.append("complete: the description fits; `rl-rollout cache verify DIR` checks every byte")
    lines += _sizes("set aside in broken/", listing.set_aside)
    lines += _sizes("left by writers that died", listing.leftovers)
    if listing.set_aside or listing.leftovers or listing.num_broken:
        lines.append("`rl-rollout cache prune DIR --broken` removes what is broken, set aside or left")
    return _joined(lines)


def verified_text(entry: EntryReport) -> str:
    """Return the line of `verify` for one entry."""
    if entry.fault is not None:
        return f"{entry.fault.word}  {_fault(entry.fault)}\n"
    held = "" if entry.counts is None else f"  {_counted(entry.counts.trajectories, 'trajectory', 'trajectories')}"
    return f"ok      {entry.name}{held}\n"


def verification_text(num_entries: int, num_broken: int) -> str:
    """Return the last line of `verify`."""
    return f"{_counted(num_entries - num_broken, 'entry', 'entries')} ok, {num_broken or 'none'} broken\n"


def pruning_text(removed: Sequence[Removal], *, kept: tuple[int, int], is_dry_run: bool) -> str:
    """Return the report of `prune`: what was removed, and the number and size of the remaining entries."""
    verb, stay = ("would remove", "would remain") if is_dry_run else ("removed", "remain")
    lines = [f"{verb}  {printable(one.name, width=120)}  {bytes_text(one.size_bytes)}  ({one.why})" for one in removed]
    total = bytes_text(sum(one.size_bytes for one in removed))
    lines.append(f"{verb} {total}; {_counted(kept[0], 'entry', 'entries')} of {bytes_text(kept[1])} {stay}")
    return _joined(lines)


def _row(entry: EntryReport) -> tuple[str, ...]:
    counts, size = entry.counts, bytes_text(entry.size_bytes)
    if counts is None:
        return entry.name, *("-" for _ in range(6)), size, "-", "-", entry.fault.word if entry.fault else "-"
    numbers = (counts.groups, counts.sessions, counts.failed_sessions, counts.trajectories, counts.tokens)
    policy = _policy((entry.fingerprint or {}).get("policy"))
    made, seconds = _made_at(entry), _seconds(entry.generate_s)
    return entry.name, made, *(f"{n:,}" for n in numbers), size, seconds, policy, "complete"


def _fault(fault: Fault) -> str:
    """Return the full path and the shortened reason of a fault."""
    return f"{printable(fault.path, width=None)}: {printable(fault.reason, width=MAX_REASON)}"


def _sizes(what: str, found: Sequence[Named]) -> Iterator[str]:
    if found:
        yield f"{what}: {len(found)}, {bytes_text(sum(each.size_bytes for each in found))}"
        yield from (f"  {printable(each.name, width=120)}  {bytes_text(each.size_bytes)}" for each in found)


def _held(counts: Counts) -> str:
    return (
        f"{_counted(counts.groups, 'group')}, {_counted(counts.sessions, 'session')} "
        f"({counts.failed_sessions:,} failed), {_counted(counts.trajectories, 'trajectory', 'trajectories')}, "
        f"{_counted(counts.tokens, 'token')}"
    )


def _policy(policy: Json) -> str:
    """Return a policy in one word: its weights' digest, or the last part of its origin with the version or versions."""
    if isinstance(policy, dict) and isinstance(policy.get("weights"), str):
        return printable(policy["weights"][:DIGEST_DIGITS])
    if isinstance(policy, dict) and isinstance(policy.get("origin"), str):
        version, versions = policy.get("version"), policy.get("versions")
        last = policy["origin"].rstrip("/").rpartition("/")[2]
        if isinstance(versions, list):
            version = "-".join(str(each) for each in dict.fromkeys(versions))
        return printable(last if version is None else f"{last}@{version}", width=32)
    return "-" if policy is None else printable(json.dumps(policy), width=32)


def _made_at(entry: EntryReport) -> str:
    return (entry.made_at or "-").rstrip("Z").replace("T", " ")


def _seconds(seconds: float | None) -> str:
    """Format seconds, also implausibly large ones from a forged manifest."""
    if seconds is None:
        return "-"
    return f"{seconds:,.1f} s" if abs(seconds) < 1e7 else f"{seconds:.3g} s"


def _counted(count: int, what: str, plural: str = "") -> str:
    """Return a count with its noun, such as "1 entry" or "2 entries"."""
    return f"{count:,} {what if count == 1 else plural or what + 's'}"


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
