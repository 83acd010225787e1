"""What `rl-rollout cache show` finds out as text for a terminal, which nothing in an entry can garble."""

import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.queue.report_text import printable
from rl_core.records import Json
from rl_rollout.skip.report_text import counted, shown_bytes, shown_seconds
from rl_rollout.skip.shown import ShownEntry, ShownGroup, ShownSession, ShownTrajectory

MAX_CHARACTERS = 2000
MAX_IDS = 48
MAX_VALUE = 200
MAX_PARTS = 200
NUM_DIGESTS = 2
TIMINGS = {"generate_s": "generated in", "tools_s": "tools", "reward_s": "scored in"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """None shows all."""

    characters: int | None
    ids: int | None
    value: int | None


def shown_text(shown: ShownEntry, *, is_full: bool) -> str:
    """An entry: what holds for it, then its first prompts, each with its first responses.

    Args:
        shown: The entry.
        is_full: Whether to show long texts whole.
    """
    limits = (
        _Limits(characters=None, ids=None, value=None)
        if is_full
        else _Limits(characters=MAX_CHARACTERS, ids=MAX_IDS, value=MAX_VALUE)
    )
    lines = list(_head(shown))
    for group in shown.groups:
        lines += ["", *_group(group, limits)]
    counts = shown.entry.counts
    rest = 0 if counts is None else counts.groups - len(shown.groups)
    if rest > 0:
        lines += ["", f"and {counted(rest, 'more prompt')}; --groups N shows more"]
    return "\n".join(lines) + "\n"


def _head(shown: ShownEntry) -> Iterator[str]:
    entry, counts = shown.entry, shown.entry.counts
    yield f"entry {entry.name} in {printable(shown.directory, width=None)}" + (
        f" ({shown.choice})" if shown.choice else ""
    )
    if entry.fault is not None or counts is None:
        reason = entry.fault.reason if entry.fault else "it has no manifest"
        yield f"  BROKEN: {printable(reason, width=240)}"
        return
    made_at = (entry.made_at or "-").rstrip("Z").replace("T", " ")
    yield f"  made at      {made_at} UTC; generated in {shown_seconds(entry.generate_s)}"
    yield (
        f"  holds        {counted(counts.groups, 'group')}, {counted(counts.sessions, 'session')} "
        f"({counts.failed_sessions:,} failed), {counted(counts.trajectories, 'trajectory', 'trajectories')}, "
        f"{counted(counts.tokens, 'token')}"
    )
    compressed = "lz4" if any(array.is_compressed for array in shown.arrays) else "not compressed"
    yield f"  size         {shown_bytes(entry.size_bytes)}, {compressed}"
    for array in shown.arrays:
        yield f"    {array.name:<18} {array.dtype:<8} {array.num_values:>12,}  {shown_bytes(array.size_bytes):>9}"
    yield "  made of"
    parts = list(_parts("", entry.fingerprint)) if entry.fingerprint else [("nothing that it says", "")]
    for name, value in parts[:MAX_PARTS]:
        yield f"    {printable(name, width=60):<28} {printable(value, width=120)}"
    if len(parts) > MAX_PARTS:
        yield f"    and {len(parts) - MAX_PARTS:,} more; --json lists all"
    yield f"  tokenizer    {printable(shown.tokenizer, width=None)}"


def _parts(name: str, value: Json) -> Iterator[tuple[str, str]]:
    """A fingerprint's parts by dotted name; of prompts their number and the first digests."""
    if name == "prompts" and isinstance(value, list):
        first = ", ".join(str(digest)[:12] for digest in value[:NUM_DIGESTS])
        yield name, f"{len(value):,}: {first}" + (", ..." if len(value) > NUM_DIGESTS else "")
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _parts(f"{name}.{key}" if name else key, item)
    else:
        yield name, _json(value)


def _group(group: ShownGroup, limits: _Limits) -> Iterator[str]:
    yield (
        f"prompt {group.index}: {printable(group.uid)}, of {printable(group.data_source)}, "
        f"{counted(len(group.prompt_ids), 'token')}"
    )
    if group.messages:
        for message in group.messages:
            yield from _message(message, limits)
    else:
        yield from _tokens(group.prompt, group.prompt_ids, limits)
    yield f"  ground truth: {printable(_json(group.ground_truth), width=limits.value)}"
    if group.columns:
        yield f"  columns: {printable(_json(group.columns), width=limits.value)}"
    for session in group.sessions:
        yield from _session(session, limits)
    if (rest := group.num_sessions - len(group.sessions)) > 0:
        yield f"  and {counted(rest, 'more session')}; --sessions N shows more"


def _message(message: Any, limits: _Limits) -> Iterator[str]:
    """A message by its role; what is not text is shown as JSON."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, message)
    yield f"  {printable(str(role)) if role is not None else 'message'}"
    yield from _lines(content if isinstance(content, str) else _json(content), limits)
    others = {k: v for k, v in message.items() if k not in ("role", "content")} if isinstance(message, dict) else {}
    if others:
        yield f"    {printable(_json(others), width=limits.value)}"


def _session(session: ShownSession, limits: _Limits) -> Iterator[str]:
    head = f"  session {session.index}"
    if session.failure is not None:
        yield f"{head}: FAILED: {printable(session.failure, width=limits.value)}"
    elif not session.trajectories:
        yield f"{head}: no trajectory"
    for number, row in enumerate(session.trajectories):
        yield f"{head}{f' trajectory {number}' if len(session.trajectories) > 1 else ''}: {_facts(row, limits)}"
        yield from _tokens(row.response, row.response_ids, limits)
        if row.extras:
            yield f"    extras: {printable(_json(row.extras), width=limits.value)}"


def _facts(row: ShownTrajectory, limits: _Limits) -> str:
    components = ", ".join(f"{name} {_number(value)}" for name, value in row.reward_components.items())
    said = [
        f"reward {'none' if row.reward is None else _number(row.reward)}" + (f" ({components})" if components else "")
    ]
    said.append(row.finish_reason)
    tools = row.num_response_tokens - row.num_trained_tokens
    said.append(
        f"{row.num_prompt_tokens:,} prompt + {counted(row.num_response_tokens, 'response token')}"
        + (f" ({tools:,} not sampled)" if tools else "")
    )
    if row.policy_versions is not None:
        oldest, newest = row.policy_versions
        said.append(f"policy version {oldest}" if oldest == newest else f"policy versions {oldest} to {newest}")
    said += [f"{what} {shown_seconds(row.timings[name])}" for name, what in TIMINGS.items() if row.timings.get(name)]
    if row.timings.get("preemptions"):
        said.append(f"{row.timings['preemptions']} preemptions")
    return printable(", ".join(said), width=limits.value)


def _tokens(text: str | None, ids: Sequence[int], limits: _Limits) -> Iterator[str]:
    if text is not None:
        yield from _lines(text, limits)
        return
    first = ids if limits.ids is None else ids[: limits.ids]
    more = f" ... and {len(ids) - len(first):,} more; --full shows all" if len(first) < len(ids) else ""
    yield f"    | tokens {' '.join(map(str, first))}{more}" if ids else "    | no tokens"


def _lines(text: str, limits: _Limits) -> Iterator[str]:
    """A text line by line; characters that move a cursor, change a colour or hide are written out."""
    cut = text if limits.characters is None else text[: limits.characters]
    for line in cut.split("\n"):
        yield f"    | {''.join(map(_plain, line.expandtabs(4)))}".rstrip()
    if len(cut) < len(text):
        yield f"    | ... and {len(text) - len(cut):,} more characters; --full shows all"


def _plain(character: str) -> str:
    """Marks stay here, as many scripts cannot be read without them; in tables they would garble columns."""
    is_shown = character.isprintable() or unicodedata.category(character) == "Zs"
    return character if is_shown else character.encode("unicode_escape").decode("ascii")


def _number(value: Json) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else _json(value)
    return str(value)


def _json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
