"""Converts groups of rollouts to flat arrays and back. `error`, `rescored` and `timings.reward_wait_s` are not stored.

The tokens of all trajectories are concatenated, with offsets; so are the prompts' tokens. Everything else (uids,
messages, rewards, timings, failures) is one JSON document, stored as bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.data import ExpertArray, Json, Prompt, Timings, Trajectory, offsets_of
from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files import count_values, load_json, preview
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult

Arrays = Mapping[str, NDArray[Any]]

TOKEN_DTYPES = {
    "input_ids": "int32",
    "loss_mask": "bool",
    "rollout_logprobs": "float32",
    "policy_versions": "int32",
}
"""dtype of each column with one value per token."""
OTHER_DTYPES = {"offsets": "int64", "prompt_ids": "int32", "prompt_offsets": "int64", "records": "uint8"}
EXPERT_DTYPES = {"routed_experts": "int16", "expert_shapes": "int32"}
"""`expert_shapes` has layers and top_k of each trajectory, 0 for one without experts; an entry without any has none."""
DTYPES = {**TOKEN_DTYPES, **OTHER_DTYPES, **EXPERT_DTYPES}
"""dtype of every array that an entry may have."""
RECORDS = (GroupResult, Prompt, SessionResult, Trajectory, Timings)
NOT_STORED = ("error", "rescored", "reward_wait_s")
IN_ARRAYS = (*TOKEN_DTYPES, "routed_experts")
MAX_RECORDS_BYTES = 1 << 28
MAX_RECORDS_VALUES = 1 << 23
MAX_SHOWN = 240
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of an entry's content."""

    groups: Count
    sessions: Count
    failed_sessions: Count
    trajectories: Count
    tokens: Count


def count(groups: Sequence[GroupResult]) -> Counts:
    """Count the groups, sessions, failed sessions, trajectories and tokens."""
    trajectories = _trajectories(groups)
    return Counts(
        groups=len(groups),
        sessions=sum(len(group.sessions) for group in groups),
        failed_sessions=sum(len(group.failures) for group in groups),
        trajectories=len(trajectories),
        tokens=sum(len(trajectory.input_ids) for trajectory in trajectories),
    )


def storable(groups: Sequence[GroupResult]) -> list[GroupResult]:
    """Return the groups without those trajectories of failed sessions that cannot be stored.

    Invalid trajectories, with wrong dtypes, names or extras, may be the reason that a session failed. They never train,
    and must not prevent the other sessions from being stored.
    """
    return [
        replace(group, sessions=tuple(_storable(each, group, index) for index, each in enumerate(group.sessions)))
        if group.failures
        else group
        for group in groups
    ]


def iter_arrays(groups: Sequence[GroupResult]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the 1-D array of each column; one can be stored while the next is built.

    Raises:
        CacheError: A field of a prompt or trajectory is not JSON, the indices of a trajectory do not match its
            position, or the records are too large; the message names it.
    """
    for group in groups:
        for index, session in enumerate(group.sessions):
            if (problem := _misplaced(session, group, index)) is not None:
                raise CacheError(f"{problem} Fix them in the agent loop.")
    trajectories, prompts = _trajectories(groups), [group.prompt for group in groups]
    for name, dtype in TOKEN_DTYPES.items():
        yield name, _joined(trajectories, name, dtype)
    if any(row.routed_experts is not None for row in trajectories):
        experts = [
            np.zeros((0, 0, 0), np.int16) if row.routed_experts is None else row.routed_experts for row in trajectories
        ]
        yield "routed_experts", np.concatenate([one.reshape(-1) for one in experts])
        yield "expert_shapes", np.array([one.shape[1:] for one in experts], np.int32).reshape(-1)
    yield "records", np.frombuffer(_encode_records(groups), dtype=np.uint8)
    yield "offsets", offsets_of([len(trajectory.input_ids) for trajectory in trajectories])
    yield "prompt_ids", _joined(prompts, "input_ids", "int32")
    yield "prompt_offsets", offsets_of([len(prompt.input_ids) for prompt in prompts])


def decode_groups(arrays: Arrays, *, path: str) -> list[GroupResult]:
    """Rebuild the groups from their arrays.

    Args:
        arrays: Arrays from `iter_arrays`, by name, with their dtypes already checked.
        path: The entry's path, for error messages.

    Raises:
        BrokenEntryError: The arrays are inconsistent.
    """
    required = TOKEN_DTYPES.keys() | OTHER_DTYPES.keys()
    if arrays.keys() not in (required, required | EXPERT_DTYPES.keys()):
        raise BrokenEntryError(path, f"it has the arrays {sorted(arrays)}; expected {sorted(required)}")
    for name in TOKEN_DTYPES:
        _check_length(arrays[name], len(arrays["input_ids"]), path=f"{path}/{name}")
    if arrays["loss_mask"].view(np.uint8).max(initial=0) > 1:  # numpy accepts any byte as bool, with undefined results
        raise BrokenEntryError(f"{path}/loss_mask", "its values must be 0 or 1")
    rows = _split(arrays, "input_ids", "offsets", tuple(TOKEN_DTYPES), path=path)
    prompts = _split(arrays, "prompt_ids", "prompt_offsets", ("prompt_ids",), path=path)
    for row, experts in zip(rows, _split_experts(arrays, np.diff(arrays["offsets"]), path=path), strict=True):
        row["routed_experts"] = experts
    where, num_used = f"{path}/records", 0
    if len(arrays["records"]) > MAX_RECORDS_BYTES:
        raise BrokenEntryError(where, f"it has {len(arrays['records'])} bytes; expected at most {MAX_RECORDS_BYTES}")
    try:
        records = load_json(arrays["records"].tobytes(), max_values=MAX_RECORDS_VALUES)
        for number, record in enumerate(records):
            record["prompt"]["input_ids"] = prompts[number]["prompt_ids"]
            for session in record["sessions"]:
                for trajectory in session["trajectories"]:
                    trajectory.update(rows[num_used])
                    num_used += 1
        groups: list[GroupResult] = msgspec.convert(records, list[GroupResult], dec_hook=lambda _, value: value)
    except Exception as error:  # records of another form raise many types
        shown = preview(str(error), most=MAX_SHOWN)[1:-1]
        raise BrokenEntryError(where, f"it cannot be read ({type(error).__name__}: {shown})") from None
    if (num_used, len(groups)) != (len(rows), len(prompts)):
        raise BrokenEntryError(
            where, f"it has {num_used} trajectories of {len(groups)} prompts; expected {len(rows)} of {len(prompts)}"
        )
    for group in groups:
        for index, session_result in enumerate(group.sessions):
            if (problem := _misplaced(session_result, group, index)) is not None:
                raise BrokenEntryError(where, problem)
    return groups


def _split(arrays: Arrays, values: str, offsets: str, names: Sequence[str], *, path: str) -> list[dict[str, Any]]:
    """Return the part of each array that belongs to each row."""
    ends, total = arrays[offsets], len(arrays[values])
    is_whole = len(ends) >= 1 and ends[0] == 0 and ends[-1] == total
    if not is_whole or bool((ends[1:] < ends[:-1]).any()):
        raise BrokenEntryError(f"{path}/{offsets}", f"offsets must rise from 0 to {total}")
    places = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    return [{name: arrays[name][start:stop] for name in names} for start, stop in places]


def _split_experts(arrays: Arrays, lengths: NDArray[np.int64], *, path: str) -> list[ExpertArray | None]:
    """Return the [T, layers, top_k] experts of each trajectory; None for one without experts."""
    if "routed_experts" not in arrays:
        return [None] * len(lengths)
    values, shapes = arrays["routed_experts"], arrays["expert_shapes"].astype(np.int64)
    _check_length(shapes, 2 * len(lengths), path=f"{path}/expert_shapes")
    sizes = [
        size * layers * top_k
        for size, layers, top_k in zip(lengths.tolist(), *shapes.reshape(-1, 2).T.tolist(), strict=True)
    ]
    if shapes.min(initial=0) < 0:
        raise BrokenEntryError(f"{path}/expert_shapes", "a shape must not be negative")
    _check_length(values, sum(sizes), path=f"{path}/routed_experts")
    pairs = zip(np.cumsum([0, *sizes]).tolist(), sizes, lengths, shapes.reshape(-1, 2), strict=False)
    return [
        values[start : start + size].reshape(length, *shape) if shape.any() else None
        for start, size, length, shape in pairs
    ]


def _storable(session: SessionResult, group: GroupResult, index: int) -> SessionResult:
    if session.failure is None or not session.trajectories:
        return session
    alone = replace(group, sessions=(*([SessionResult()] * index), session))
    try:
        decode_groups(dict(iter_arrays([alone])), path="")
    except Exception:  # results of a custom loop can raise any error when they are read
        return replace(session, trajectories=())
    return session


def _misplaced(session: SessionResult, group: GroupResult, index: int) -> str | None:
    """Return why a trajectory's prompt uid or indices do not match its position; None if all do."""
    for output_index, row in enumerate(session.trajectories):
        expected = (group.prompt.uid, index, output_index)
        found = (row.prompt_uid, row.session_index, row.output_index)
        if found != expected:
            return (
                "prompt_uid, session_index and output_index of a trajectory must match its position: expected "
                f"{preview(expected)}; found {preview(found)}."
            )
    return None


def _trajectories(groups: Sequence[GroupResult]) -> list[Trajectory]:
    """Return the trajectories of all sessions, including failed ones."""
    return [row for group in groups for session in group.sessions for row in session.trajectories]


def _joined(rows: Sequence[Trajectory | Prompt], name: str, dtype: str) -> NDArray[Any]:
    parts = [getattr(row, name) for row in rows]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _encode_records(groups: Sequence[GroupResult]) -> bytes:
    parts = []
    for group in groups:
        try:
            parts.append(json.dumps(_without_arrays(group)))
        except (TypeError, ValueError, RecursionError) as error:
            raise CacheError(
                f"{_unstorable(group.prompt)} of prompt {group.prompt.uid!r} cannot be stored: it must be JSON "
                f"({error}). Remove it from the prompt's row or from the agent loop's result."
            ) from error
    raw = f"[{','.join(parts)}]".encode()
    if len(raw) > MAX_RECORDS_BYTES or count_values(raw) > MAX_RECORDS_VALUES:
        raise CacheError(
            f"the records other than tokens have {len(raw)} bytes of JSON with up to {count_values(raw)} values; an "
            f"entry may have at most {MAX_RECORDS_BYTES} bytes and {MAX_RECORDS_VALUES} values. Drop unused columns of "
            "the prompts, or store fewer prompts per entry."
        )
    return raw


def _without_arrays(value: Any) -> Json:
    """Return our records as JSON objects, with null in place of each array; other values stay as they are."""
    if isinstance(value, RECORDS):
        names = (field.name for field in fields(value) if field.name not in NOT_STORED)
        return {name: None if name in IN_ARRAYS else _without_arrays(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_without_arrays(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _unstorable(prompt: Prompt) -> str:
    """Return the name of a prompt's field that is not JSON; "sessions" if all are."""
    for name in ("messages", "ground_truth", "columns"):
        try:
            json.dumps(_without_arrays(getattr(prompt, name)))
        except (TypeError, ValueError, RecursionError):
            return name
    return "sessions"


def _check_length(array: NDArray[Any], length: int, *, path: str) -> None:
    if len(array) != length:
        raise BrokenEntryError(path, f"it has {len(array)} values; expected {length}")
