"""Formats the results of `rl-rollout cache` for a terminal, with control characters in entries escaped."""

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl_core.data import Json
from rl_core.terminal_text import bytes_text, printable, table_lines
from rl_rollout.skip.commands import EntryReport, Fault, Listing, Removal, entries_hint
from rl_rollout.skip.manifest import Counts

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
MAX_CHARACTERS, MAX_IDS, MAX_VALUE = 2000, 48, 200
"""Maximum length of a text in characters, of its tokens in ids, and of other values in characters without --full."""
MAX_PARTS = 200
"""Maximum number of fingerprint parts shown."""


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
        lines.append("complete: manifest and sizes fit; `rl-rollout cache verify DIR` checks every byte")
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


def shown_text(shown: Mapping[str, Any], *, is_full: bool) -> str:
    """Return the report of `show`: an entry's origin, then its first prompts with their first responses.

    Args:
        shown: The result of `show_entry`, plus the `directory`, and `choice`: why this entry was chosen, if none was
            named.
        is_full: Show long texts in full.
    """
    report: EntryReport = shown["entry"]
    choice = f" ({shown['choice']})" if shown["choice"] else ""
    lines = [f"entry {report.name} in {printable(shown['directory'], width=None)}{choice}", *_head(shown, report)]
    for group in shown["groups"]:
        lines += ["", *_group(group, is_full=is_full)]
    rest = 0 if report.counts is None else report.counts.groups - len(shown["groups"])
    if rest > 0:
        lines += ["", f"and {_counted(rest, 'more prompt')}; --groups N shows more"]
    return _joined(lines)


def _row(entry: EntryReport) -> tuple[str, ...]:
    counts, size = entry.counts, bytes_text(entry.size_bytes)
    if counts is None:
        return entry.name, *("-" for _ in range(6)), size, "-", "-", entry.fault.word if entry.fault else "-"
    numbers = (counts.groups, counts.sessions, counts.failed_sessions, counts.trajectories, counts.tokens)
    policy = _policy((entry.fingerprint or {}).get("policy"))
    made, seconds = _made_at(entry), _seconds(entry.generate_s)
    return entry.name, made, *(f"{n:,}" for n in numbers), size, seconds, policy, "complete"


def _head(shown: Mapping[str, Any], entry: EntryReport) -> Iterator[str]:
    if entry.fault is not None or entry.counts is None:
        yield f"  {_fault(entry.fault)}" if entry.fault else "  BROKEN: the manifest is missing"
        return
    compressed = "lz4" if any(array["is_compressed"] for array in shown["arrays"]) else "not compressed"
    yield f"  made at      {_made_at(entry)} UTC; generated in {_seconds(entry.generate_s)}"
    yield f"  content      {_held(entry.counts)}"
    yield f"  size         {bytes_text(entry.size_bytes)}, {compressed}"
    yield f"  tokenizer    {printable(shown['tokenizer'], width=None)}"
    yield "  made from"
    parts = list(_parts("", entry.fingerprint or {}))
    for name, value in parts[:MAX_PARTS]:
        yield f"    {printable(name, width=60):<28} {printable(value, width=120)}"
    if len(parts) > MAX_PARTS:
        yield f"    and {len(parts) - MAX_PARTS:,} more; --json lists all"


def _parts(name: str, value: Json) -> Iterator[tuple[str, str]]:
    """Yield a fingerprint's parts by dotted name; the prompts' part has their number and first digests."""
    if name == "prompts" and isinstance(value, list):
        yield name, f"{len(value):,}: {', '.join(str(digest)[:DIGEST_DIGITS] for digest in value[:2])}, ..."
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _parts(f"{name}.{key}" if name else key, item)
    else:
        yield name, _json(value)


def _group(group: Mapping[str, Any], *, is_full: bool) -> Iterator[str]:
    width = None if is_full else MAX_VALUE
    tokens = _counted(len(group["prompt_ids"]), "token")
    yield f"prompt {group['index']}: {printable(group['uid'])}, of {printable(group['data_source'])}, {tokens}"
    for message in group["messages"]:
        yield from _message(message, is_full=is_full)
    if not group["messages"]:
        yield from _tokens(group["prompt"], group["prompt_ids"], is_full=is_full)
    yield f"  ground truth: {printable(_json(group['ground_truth']), width=width)}"
    if group["columns"]:
        yield f"  columns: {printable(_json(group['columns']), width=width)}"
    for session in group["sessions"]:
        yield from _session(session, is_full=is_full)
    if (rest := group["num_sessions"] - len(group["sessions"])) > 0:
        yield f"  and {_counted(rest, 'more session')}; --sessions N shows more"


def _message(message: Any, *, is_full: bool) -> Iterator[str]:
    """Yield the lines of a message; content other than text is shown as JSON."""
    others = dict(message) if isinstance(message, dict) else {"content": message}
    role, content = others.pop("role", None), others.pop("content", None)
    yield f"  {'message' if role is None else printable(str(role))}"
    yield from _lines(content if isinstance(content, str) else _json(content), is_full=is_full)
    if others:
        yield f"    {printable(_json(others), width=None if is_full else MAX_VALUE)}"


def _session(session: Mapping[str, Any], *, is_full: bool) -> Iterator[str]:
    head, rows, width = f"  session {session['index']}", session["trajectories"], None if is_full else MAX_VALUE
    if session["failure"] is not None:
        yield f"{head}: FAILED: {printable(session['failure'], width=width)}"
    elif not rows:
        yield f"{head}: no trajectory"
    for number, row in enumerate(rows):
        name = f"{head} trajectory {number}" if len(rows) > 1 else head
        yield f"{name}: {printable(_facts(row), width=width)}"
        yield from _tokens(row["response"], row["response_ids"], is_full=is_full)
        if row["extras"]:
            yield f"    extras: {printable(_json(row['extras']), width=width)}"


def _facts(row: Mapping[str, Any]) -> str:
    branch = "" if row["parent"] is None else f"branches off trajectory {row['parent']}, "
    components = ", ".join(f"{name} {_number(value)}" for name, value in row["reward_components"].items())
    reward = f"{branch}reward {_number(row['reward'])}" + (f" ({components})" if components else "")
    response = _counted(row["num_response_tokens"], "response token")
    not_sampled = row["num_response_tokens"] - row["num_trained_tokens"]
    tools = f" ({not_sampled:,} not sampled)" if not_sampled else ""
    facts = [reward, row["finish_reason"], f"{row['num_prompt_tokens']:,} prompt + {response}{tools}"]
    if row["policy_versions"]:
        facts.append("policy version " + " to ".join(map(str, dict.fromkeys(row["policy_versions"]))))
    return ", ".join(facts)


def _tokens(text: str | None, ids: Sequence[int], *, is_full: bool) -> Iterator[str]:
    if text is not None:
        yield from _lines(text, is_full=is_full)
        return
    first = ids if is_full else ids[:MAX_IDS]
    more = f" ... and {len(ids) - len(first):,} more; --full shows all" if len(first) < len(ids) else ""
    yield f"    | tokens {' '.join(map(str, first))}{more}" if ids else "    | no tokens"


def _lines(text: str, *, is_full: bool) -> Iterator[str]:
    """Yield a text's lines; characters that move the cursor, change a colour or are invisible are escaped."""
    cut = text if is_full else text[:MAX_CHARACTERS]
    for line in cut.split("\n"):
        yield f"    | {''.join(map(_plain, line.expandtabs(4)))}".rstrip()
    if len(cut) < len(text):
        yield f"    | ... and {len(text) - len(cut):,} more characters; --full shows all"


def _plain(character: str) -> str:
    """Escape a non-printable character. Combining marks stay here, unlike in tables, whose columns they would shift."""
    is_shown = character.isprintable() or unicodedata.category(character) == "Zs"
    return character if is_shown else character.encode("unicode_escape").decode("ascii")


def _fault(fault: Fault) -> str:
    """Return the full path and the shortened reason of a fault."""
    return f"{printable(fault.path, width=None)}: {printable(fault.reason, width=MAX_REASON)}"


def _sizes(what: str, found: Mapping[str, int]) -> Iterator[str]:
    if found:
        yield f"{what}: {len(found)}, {bytes_text(sum(found.values()))}"
        yield from (f"  {printable(name, width=120)}  {bytes_text(size)}" for name, size in found.items())


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


def _number(value: Json) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else _json(value)


def _json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
