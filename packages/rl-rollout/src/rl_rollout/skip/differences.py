"""How two entries differ: in what they were made of, and in what they hold."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.errors import BrokenEntryError
from rl_core.records import Json, Prompt, Trajectory
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult
from rl_rollout.skip.commands import fault_of
from rl_rollout.skip.fingerprint import compare, prompt_digest
from rl_rollout.skip.manifest import EntryKey
from rl_rollout.skip.report import Fault, as_plain
from rl_rollout.skip.store import EntryStore, StoredEntry

Place = tuple[EntryStore, EntryKey]


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not the same.

    Attributes:
        name: Such as "sampling.temperature", "reward" or "tokens".
        a: What A has, in words.
        b: What B has, in words.
    """

    name: str
    a: str
    b: str


class RowDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A session or a trajectory that is not the same in both.

    Attributes:
        prompt: uid of its prompt in A.
        session: Its index.
        trajectory: Its index in the session; None of a session.
        fields: What differs.
        logprob_gap: Largest absolute difference of rollout_logprobs; None where tokens differ or none does.
    """

    prompt: str
    session: int
    trajectory: int | None
    fields: tuple[Field, ...]
    logprob_gap: float | None = None


class EntryDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How two entries differ; uids, timings and when they were made are not compared.

    Attributes:
        a: Path of one entry.
        b: Path of the other.
        fault: What is broken in one of them; then nothing was compared.
        fingerprint: What they were made of, where it is not the same.
        only_a: uids of prompts that A alone has.
        only_b: uids of prompts that B alone has.
        is_order_same: Whether the prompts of both come in the same order.
        num_prompts: Prompts that both have, which were compared.
        num_trajectories: Trajectories that both have, which were compared.
        num_different: How many trajectories differ, by what differs.
        max_logprob_gap: Largest absolute difference of rollout_logprobs where tokens are the same.
        rows: Every session and trajectory that differs.
    """

    a: str
    b: str
    fault: Fault | None = None
    fingerprint: tuple[Field, ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    is_order_same: bool = True
    num_prompts: int = 0
    num_trajectories: int = 0
    num_different: dict[str, int] = {}
    max_logprob_gap: float = 0.0
    rows: tuple[RowDifference, ...] = ()

    @property
    def is_same(self) -> bool:
        """True when nothing that is compared differs."""
        is_content_same = self.is_order_same and not (self.only_a or self.only_b or self.rows)
        return self.fault is None and is_content_same and not self.fingerprint


class FolderDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How the entries of two directories differ.

    Attributes:
        a: One directory.
        b: The other.
        only_a: Entries that A alone has.
        only_b: Entries that B alone has.
        entries: Entries of the same name in both.
    """

    a: str
    b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    entries: tuple[EntryDifference, ...]

    @property
    def is_same(self) -> bool:
        """True when both have the same entries, and these are the same."""
        return not (self.only_a or self.only_b) and all(entry.is_same for entry in self.entries)


def compare_folders(a: tuple[EntryStore, str], b: tuple[EntryStore, str]) -> FolderDifference:
    """Compare every entry that two directories both have.

    Raises:
        CacheError: A directory cannot be read.
        MissingExtraError: zarr is not installed.
    """
    (store_a, name_a), (store_b, name_b) = a, b
    keys_a, keys_b = store_a.entries(), store_b.entries()
    return FolderDifference(
        a=name_a,
        b=name_b,
        only_a=tuple(key.name for key in keys_a if key not in keys_b),
        only_b=tuple(key.name for key in keys_b if key not in keys_a),
        entries=tuple(compare_entries((store_a, key), (store_b, key)) for key in keys_a if key in keys_b),
    )


def compare_entries(a: Place, b: Place) -> EntryDifference:
    """Compare two entries: every prompt with the one of the same content, its sessions and trajectories by index.

    Raises:
        CacheError: An entry cannot be read.
        MissingExtraError: zarr is not installed.
    """
    path_a, path_b = (store.folder.path_of(key.name) for store, key in (a, b))
    found: list[StoredEntry] = []
    for store, key in (a, b):
        try:
            entry = store.read(key)
        except BrokenEntryError as error:
            return EntryDifference(a=path_a, b=path_b, fault=fault_of(error, store, key))
        if entry is None:
            gone = Fault(path=store.folder.path_of(key.name), reason="it was removed meanwhile")
            return EntryDifference(a=path_a, b=path_b, fault=gone)
        found.append(entry)
    one, other = found
    pairs = _paired(one.groups, other.groups)
    both = [(i, j) for i, j in pairs if i is not None and j is not None]
    rows = tuple(row for i, j in both for row in _group_differences(one.groups[i], other.groups[j]))
    counts: dict[str, int] = {}
    for row in rows:
        for field in row.fields:
            counts[field.name] = counts.get(field.name, 0) + 1
    return EntryDifference(
        a=path_a,
        b=path_b,
        fingerprint=tuple(_fingerprint_differences(one, other)),
        only_a=tuple(one.groups[i].prompt.uid for i, j in pairs if i is not None and j is None),
        only_b=tuple(other.groups[j].prompt.uid for i, j in pairs if i is None and j is not None),
        is_order_same=[j for _, j in both] == sorted(j for _, j in both),
        num_prompts=len(both),
        num_trajectories=sum(_num_common(one.groups[i], other.groups[j]) for i, j in both),
        num_different=counts,
        max_logprob_gap=max((row.logprob_gap for row in rows if row.logprob_gap is not None), default=0.0),
        rows=rows,
    )


def _fingerprint_differences(a: StoredEntry, b: StoredEntry) -> Iterator[Field]:
    """Of fingerprints that are cut where they are nested too deeply to be walked."""
    for each in compare(as_plain(a.manifest.fingerprint), as_plain(b.manifest.fingerprint)):
        yield Field(name=each.name, a=each.stored, b=each.live)


def _paired(a: Sequence[GroupResult], b: Sequence[GroupResult]) -> list[tuple[int | None, int | None]]:
    """Places of the prompts of the same content, the first with the first; None for one that has no other."""
    waiting: dict[str, list[int]] = {}
    for place, group in enumerate(b):
        waiting.setdefault(_digest(group.prompt), []).append(place)
    pairs: list[tuple[int | None, int | None]] = []
    for place, group in enumerate(a):
        others = waiting.get(_digest(group.prompt))
        pairs.append((place, others.pop(0) if others else None))
    return [*pairs, *((None, place) for places in waiting.values() for place in places)]


def _digest(prompt: Prompt) -> str:
    try:
        return prompt_digest(prompt)
    except RecursionError:
        raise BrokenEntryError(prompt.uid, "this prompt is nested too deeply to be compared") from None


def _num_common(a: GroupResult, b: GroupResult) -> int:
    return sum(min(len(x.trajectories), len(y.trajectories)) for x, y in zip(a.sessions, b.sessions, strict=False))


def _group_differences(a: GroupResult, b: GroupResult) -> Iterator[RowDifference]:
    uid = a.prompt.uid
    for index in range(max(len(a.sessions), len(b.sessions))):
        x, y = (group.sessions[index] if index < len(group.sessions) else None for group in (a, b))
        if x is None or y is None:
            there = Field(name="sessions", a=_is_there(x), b=_is_there(y))
            yield RowDifference(prompt=uid, session=index, trajectory=None, fields=(there,))
            continue
        if fields := tuple(_session_fields(x, y)):
            yield RowDifference(prompt=uid, session=index, trajectory=None, fields=fields)
        for number, (row, other) in enumerate(zip(x.trajectories, y.trajectories, strict=False)):
            fields, gap = _row_fields(row, other)
            if fields:
                yield RowDifference(prompt=uid, session=index, trajectory=number, fields=fields, logprob_gap=gap)


def _session_fields(a: SessionResult, b: SessionResult) -> Iterator[Field]:
    if a.failure != b.failure:
        yield Field(name="failure", a=a.failure or "none", b=b.failure or "none")
    if len(a.trajectories) != len(b.trajectories):
        yield Field(name="trajectories", a=str(len(a.trajectories)), b=str(len(b.trajectories)))


def _row_fields(a: Trajectory, b: Trajectory) -> tuple[tuple[Field, ...], float | None]:
    """What differs of two trajectories, and the largest difference of logprobs where the tokens are the same."""
    fields: list[Field] = []
    gap = None
    if not np.array_equal(a.input_ids, b.input_ids):
        fields.append(_array_field("tokens", a.input_ids, b.input_ids))
    elif not np.array_equal(a.rollout_logprobs, b.rollout_logprobs, equal_nan=True):
        gap = _largest_gap(a.rollout_logprobs, b.rollout_logprobs)
        fields.append(_array_field("logprobs", a.rollout_logprobs, b.rollout_logprobs))
    if len(a.input_ids) == len(b.input_ids):
        pairs = ((name, getattr(a, name), getattr(b, name)) for name in ("loss_mask", "policy_versions"))
        fields += [_array_field(name, x, y) for name, x, y in pairs if not np.array_equal(x, y)]
    for name in ("reward", "reward_components", "finish_reason", "extras"):
        one, other = (as_plain(getattr(row, name), is_finite=False) for row in (a, b))
        if one != other and _sorted(one) != _sorted(other):  # NaN is not equal to itself
            fields.append(Field(name=name, a=_shown(one), b=_shown(other)))
    return tuple(fields), gap


def _array_field(name: str, a: NDArray[Any], b: NDArray[Any]) -> Field:
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    first = int(differing[0]) if len(differing) else length
    texts = [
        f"{len(values)} from {first}: {', '.join(_shown(value) for value in values[first : first + 4].tolist())}"
        if first < len(values)
        else f"{len(values)}, which end there"
        for values in (a, b)
    ]
    return Field(name=name, a=texts[0], b=texts[1])


def _largest_gap(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Of logprobs at the same tokens; infinite where one alone is no number."""
    one, other = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gaps = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other))
    return float(np.nan_to_num(gaps, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _is_there(session: SessionResult | None) -> str:
    return "none" if session is None else "there"


def _sorted(value: Json) -> str:
    return json.dumps(value, sort_keys=True)


def _shown(value: Json) -> str:
    is_rounded = isinstance(value, float) and math.isfinite(value)
    text = f"{value:.6g}" if is_rounded else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
