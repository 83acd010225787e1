"""What `rl-rollout cache` finds out as text for a terminal, which nothing in an entry can garble."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rl_core.queue.report_text import printable
from rl_core.records import Json
from rl_rollout.skip.commands import entries_hint
from rl_rollout.skip.differences import EntryDifference, Field, FolderDifference
from rl_rollout.skip.report import EntryReport, Fault, Listing, Pruning, StoredBytes, Verification, Verified

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
MAX_ROWS = 20
DIGEST_DIGITS = 12


def listing_text(listing: Listing) -> str:
    """The table of `ls`, then totals."""
    lines = [*_table(listing.entries), ""] if listing.entries else []
    broken_entries = ((entry.name, entry.fault) for entry in listing.entries)
    lines += [f"{fault.word} {name}: {_fault(fault)}" for name, fault in broken_entries if fault is not None]
    totals, num_whole = listing.totals, len(listing.entries) - listing.num_broken
    broken = f", {listing.num_broken} broken" if listing.num_broken else ""
    lines.append(
        f"{counted(num_whole, 'entry', 'entries')}{broken}: {counted(totals.groups, 'group')}, "
        f"{counted(totals.sessions, 'session')} ({totals.failed_sessions:,} failed), "
        f"{counted(totals.trajectories, 'trajectory', 'trajectories')}, {counted(totals.tokens, 'token')}; "
        f"{shown_bytes(listing.size_bytes)} in all"
        if listing.entries
        else f"no entries in {printable(listing.directory, width=None)}; "
        f"{printable(entries_hint(listing.directory), width=None)}"
    )
    lines += _stored("set aside in broken/", listing.set_aside)
    lines += _stored("left by writers that died", listing.leftovers)
    if listing.set_aside or listing.leftovers or listing.num_broken:
        lines.append("`rl-rollout cache prune DIR --broken` removes what is broken, set aside or left")
    return "\n".join(lines) + "\n"


def verified_line(verified: Verified) -> str:
    """One line of `verify`."""
    if verified.fault is not None:
        return f"{verified.fault.word}  {_fault(verified.fault)}\n"
    held = "" if verified.counts is None else f"  {counted(verified.counts.trajectories, 'trajectory', 'trajectories')}"
    return f"ok      {verified.name}{held}\n"


def verification_text(found: Verification) -> str:
    """The last line of `verify`."""
    whole = f"{counted(len(found.entries) - found.num_broken, 'entry', 'entries')} ok"
    return f"{whole}, {found.num_broken or 'none'} broken\n"


def pruning_text(found: Pruning) -> str:
    """What went and what stays."""
    verb = "would remove" if found.is_dry_run else "removed"
    lines = [
        f"{verb}  {printable(each.name, width=120)}  {shown_bytes(each.size_bytes)}  ({each.why})"
        for each in found.removed
    ]
    stays = "would stay" if found.is_dry_run else "stay"
    lines.append(
        f"{verb} {shown_bytes(found.removed_bytes)}; {counted(found.kept_entries, 'entry', 'entries')} "
        f"of {shown_bytes(found.kept_bytes)} {stays}"
    )
    return "\n".join(lines) + "\n"


def folder_difference_text(found: FolderDifference) -> str:
    """How two directories differ."""
    lines = [f"A  {printable(found.a, width=None)}", f"B  {printable(found.b, width=None)}"]
    lines += [f"only in A: {name}" for name in found.only_a] + [f"only in B: {name}" for name in found.only_b]
    for entry in found.entries:
        name = entry.a.rstrip("/").rpartition("/")[2]
        if entry.is_same:
            lines.append(f"{name}: the same")
        else:
            lines += [f"{name}: different", *(f"  {line}" for line in _difference_lines(entry))]
    lines.append("the same" if found.is_same else "different")
    return "\n".join(lines) + "\n"


def entry_difference_text(found: EntryDifference) -> str:
    """How two entries differ."""
    lines = [f"A  {printable(found.a, width=None)}", f"B  {printable(found.b, width=None)}", *_difference_lines(found)]
    return "\n".join([*lines, "the same" if found.is_same else "different"]) + "\n"


def as_json(report: Any) -> str:
    """One JSON object, in which no control character is left as it is."""
    return json.dumps(report, indent=2).replace("\x7f", "\\u007f") + "\n"


def shown_bytes(size: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def shown_seconds(seconds: Json) -> str:
    """Seconds, however many are claimed."""
    if not isinstance(seconds, int | float):
        return "-"
    return f"{seconds:,.1f} s" if abs(seconds) < 1e7 else f"{seconds:.3g} s"


def counted(count: int, what: str, plural: str = "") -> str:
    """Such as "1 entry" or "2 entries"."""
    return f"{count:,} {what if count == 1 else plural or what + 's'}"


def policy_text(policy: Json) -> str:
    """A policy in one word: the digest of its weights, or the last part of where it is from, with its version."""
    if not isinstance(policy, dict):
        return "-" if policy is None else printable(json.dumps(policy), width=32)
    if isinstance(policy.get("weights"), str):
        return printable(policy["weights"][:DIGEST_DIGITS])
    if isinstance(policy.get("origin"), str):
        version = policy.get("version")
        last = policy["origin"].rstrip("/").rpartition("/")[2]
        return printable(f"{last}@{version}" if version is not None else last, width=32)
    return printable(json.dumps(policy), width=32)


def _table(entries: Sequence[EntryReport]) -> Iterator[str]:
    rows = [COLUMNS, *(_row(entry) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if name in RIGHT else cell.ljust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _row(entry: EntryReport) -> tuple[str, ...]:
    counts = entry.counts
    if counts is None:
        return (
            entry.name,
            *("-" for _ in range(6)),
            shown_bytes(entry.size_bytes),
            "-",
            "-",
            entry.fault.word if entry.fault else "-",
        )
    return (
        entry.name,
        (entry.made_at or "-").rstrip("Z").replace("T", " "),
        *(
            f"{number:,}"
            for number in (counts.groups, counts.sessions, counts.failed_sessions, counts.trajectories, counts.tokens)
        ),
        shown_bytes(entry.size_bytes),
        shown_seconds(entry.generate_s),
        policy_text((entry.fingerprint or {}).get("policy")),
        "ok",
    )


def _fault(fault: Fault) -> str:
    """What is broken; the path is whole, the reason cut."""
    return f"{printable(fault.path, width=None)}: {printable(fault.reason, width=MAX_REASON)}"


def _stored(what: str, found: Sequence[StoredBytes]) -> Iterator[str]:
    if found:
        yield f"{what}: {len(found)}, {shown_bytes(sum(each.size_bytes for each in found))}"
        yield from (f"  {printable(each.name, width=120)}  {shown_bytes(each.size_bytes)}" for each in found)


def _difference_lines(found: EntryDifference) -> Iterator[str]:
    if found.fault is not None:
        yield f"BROKEN {_fault(found.fault)}; nothing was compared"
        return
    if found.fingerprint:
        yield f"made of: {counted(len(found.fingerprint), 'difference')}"
        yield from (f"  {_field(field)}" for field in found.fingerprint)
    else:
        yield "made of: the same"
    yield from _content_lines(found)


def _content_lines(found: EntryDifference) -> Iterator[str]:
    order = "" if found.is_order_same else ", in another order"
    alone = f"{len(found.only_a):,} only in A, {len(found.only_b):,} only in B"
    yield f"prompts: {found.num_prompts:,} in both{order}, {alone}"
    for side, uids in (("A", found.only_a), ("B", found.only_b)):
        if uids:
            yield f"  only in {side}: {_some(printable(uid) for uid in uids)}"
    differing = ", ".join(f"{name} in {count:,}" for name, count in found.num_different.items())
    gap = f"; logprobs by at most {found.max_logprob_gap:.3g}" if found.max_logprob_gap else ""
    compared = counted(found.num_trajectories, "trajectory", "trajectories")
    same = ", all the same" if found.num_trajectories else ""
    yield f"rollouts: {compared} compared" + (f"; different: {differing}{gap}" if differing else same)
    for row in found.rows[:MAX_ROWS]:
        place = f"{printable(row.prompt)} session {row.session}"
        if row.trajectory is not None:
            place += f" trajectory {row.trajectory}"
        yield f"  {place}"
        yield from (f"    {_field(field)}" for field in row.fields)
        if row.logprob_gap is not None:
            yield f"    logprobs differ by at most {row.logprob_gap:.3g}"
    if len(found.rows) > MAX_ROWS:
        yield f"  and {len(found.rows) - MAX_ROWS:,} more; --json lists all"


def _field(field: Field) -> str:
    return f"{printable(field.name, width=80)}: A {printable(field.a, width=120)} | B {printable(field.b, width=120)}"


def _some(texts: Iterable[str]) -> str:
    found = list(texts)
    rest = [f"and {len(found) - MAX_ROWS:,} more"] if len(found) > MAX_ROWS else []
    return ", ".join([*found[:MAX_ROWS], *rest])
