"""Formats the results of `rl-rollout cache` for a terminal, with control characters in entries escaped."""

from collections.abc import Iterable, Sequence

from rl_core.data import Json
from rl_core.terminal_text import bytes_text, counted, printable, table_lines
from rl_rollout.skip.commands import EntryReport, Fault, Listing, Removal

COLUMNS = ("entry", "made at (UTC)", "groups", "failed", "trajectories", "tokens", "size", "policy", "state")
RIGHT = frozenset({"groups", "failed", "trajectories", "tokens", "size"})
MAX_REASON = 240
DIGEST_DIGITS = 12


def listing_text(listing: Listing) -> str:
    """Return the table of `ls`, the faults, the other files and the totals."""
    lines = list(table_lines(COLUMNS, [_row(entry) for entry in listing.entries], right=RIGHT))
    lines += [_fault(entry.fault) for entry in listing.entries if entry.fault is not None]
    lines += [f"set aside in broken/  {printable(each.name, width=120)}" for each in listing.set_aside]
    lines += [f"left by a writer that died  {printable(each.name, width=120)}" for each in listing.leftovers]
    held = listing.totals
    lines.append(
        f"{counted(len(listing.entries), 'entry', 'entries')}, {listing.num_broken or 'none'} broken; "
        f"{counted(held.groups, 'group')}, {counted(held.trajectories, 'trajectory', 'trajectories')}, "
        f"{counted(held.tokens, 'token')}; {bytes_text(listing.size_bytes)} with all files"
    )
    return _joined(lines)


def verified_text(entry: EntryReport) -> str:
    """Return the line of `verify` for one entry."""
    return _joined([_fault(entry.fault) if entry.fault is not None else f"ok  {entry.name}"])


def verification_text(num_entries: int, num_broken: int) -> str:
    """Return the last line of `verify`."""
    return _joined([f"{counted(num_entries - num_broken, 'entry', 'entries')} ok, {num_broken or 'none'} broken"])


def pruning_text(removed: Sequence[Removal], *, kept: tuple[int, int], is_dry_run: bool) -> str:
    """Return the report of `prune`: what was removed, and the number and size of the remaining entries."""
    verb, stay = ("would remove", "would remain") if is_dry_run else ("removed", "remain")
    lines = [f"{verb}  {printable(one.name, width=120)}  {bytes_text(one.size_bytes)}  ({one.why})" for one in removed]
    total = bytes_text(sum(one.size_bytes for one in removed))
    lines.append(f"{verb} {total}; {counted(kept[0], 'entry', 'entries')} of {bytes_text(kept[1])} {stay}")
    return _joined(lines)


def _row(entry: EntryReport) -> tuple[str, ...]:
    counts, size = entry.counts, bytes_text(entry.size_bytes)
    if entry.fault is not None or counts is None:
        return entry.name, *"-----", size, "-", entry.fault.word if entry.fault else "-"
    numbers = (counts.groups, counts.failed_sessions, counts.trajectories, counts.tokens)
    policy = _policy((entry.fingerprint or {}).get("policy"))
    return entry.name, entry.made_at or "-", *(f"{each:,}" for each in numbers), size, policy, "complete"


def _fault(fault: Fault) -> str:
    """Return the full path and the shortened reason of a fault."""
    return f"{fault.word}  {printable(fault.path, width=None)}: {printable(fault.reason, width=MAX_REASON)}"


def _policy(policy: Json) -> str:
    """Return a policy in one word: its weights' digest, or the last part of its origin with its version or versions."""
    if not isinstance(policy, dict):
        return "-"
    if policy.get("weights"):
        return printable(str(policy["weights"])[:DIGEST_DIGITS])
    origin, version = str(policy.get("origin")).rpartition("/")[2], policy.get("versions") or policy.get("version")
    return printable(f"{origin}@{version}", width=32)


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
