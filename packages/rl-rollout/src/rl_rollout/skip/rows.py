"""Converts groups of rollouts to flat arrays and back. `error`, `rescored` and `timings.reward_wait_s` are not stored.

The tokens of all trajectories are concatenated, with offsets; so are the prompts' tokens. Everything else (uids,
messages, rewards, timings, failures) is one JSON document, stored as bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.data import NO_VERSION, ExpertArray, FinishReason, Json, Prompt, Timings, Trajectory, offsets_of
from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files import count_values, load_json_as, preview
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
DTYPES = {
    **TOKEN_DTYPES,
    "row_versions": "int32",
    "offsets": "int64",
    "prompt_ids": "int32",
    "prompt_offsets": "int64",
    "records": "uint8",
    "routed_experts": "int16",
    "expert_shapes": "int32",
}
"""dtype of every array that an entry may have. `row_versions` replaces `policy_versions` if each trajectory was sampled
by a single version. `expert_shapes` has layers and top_k of each trajectory, 0 for one without experts; an entry
without any experts has neither `expert_shapes` nor `routed_experts`."""
EXPERTS = {"routed_experts", "expert_shapes"}
ROWS_AT_ONCE = 32
"""Number of rows whose versions are computed together; small enough to keep intermediate values in the CPU cache."""
MAX_RECORDS_BYTES = 1 << 28
MAX_RECORDS_VALUES = 1 << 23


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of an entry's content."""

    groups: Count
    sessions: Count
    failed_sessions: Count
    trajectories: Count
    tokens: Count


class _TrajectoryRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    finish_reason: str
    reward: float | None
    reward_components: dict[str, float]
    timings: tuple[float, float, float, int]
    extras: dict[str, Any]
    parent: int | None = None


class _SessionRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    failure: str | None
    trajectories: list[_TrajectoryRecord]


class _GroupRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    uid: str
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    columns: dict[str, Any]
    num_audited: int
    num_audit_failures: int
    sessions: list[_SessionRecord]


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
    """Yield the name and the 1-D array of each column, largest first; one can be stored while the next is built.

    Raises:
        CacheError: A field of a prompt or trajectory is not JSON, the indices of a trajectory do not match its
            position, or the records are too large; the message names it.
    """
    for group in groups:
        for index, session in enumerate(group.sessions):
            _check_rows(session, group, index)
    trajectories = _trajectories(groups)
    for name in ("input_ids", "rollout_logprobs", "loss_mask"):
        yield name, _joined(trajectories, name, DTYPES[name])
    row_versions = _row_versions(trajectories)
    if row_versions is None:
        yield "policy_versions", _joined(trajectories, "policy_versions", DTYPES["policy_versions"])
    else:
        yield "row_versions", row_versions
    if any(row.routed_experts is not None for row in trajectories):
        experts = [
            np.zeros((0, 0, 0), np.int16) if row.routed_experts is None else row.routed_experts for row in trajectories
        ]
        yield "routed_experts", np.concatenate([one.reshape(-1) for one in experts])
        yield "expert_shapes", np.array([one.shape[1:] for one in experts], np.int32).reshape(-1)
    yield "records", np.frombuffer(_encode_records(groups), dtype=np.uint8)
    yield "offsets", offsets_of([len(trajectory.input_ids) for trajectory in trajectories])
    prompts = [group.prompt for group in groups]
    yield "prompt_ids", _joined(prompts, "input_ids", DTYPES["prompt_ids"])
    yield "prompt_offsets", offsets_of([len(prompt.input_ids) for prompt in prompts])


def decode_groups(arrays: Arrays, *, path: str) -> list[GroupResult]:
    """Rebuild the groups from their arrays.

    Args:
        arrays: Arrays from `iter_arrays`, by name, with their dtypes already checked.
        path: The entry's path, for error messages.

    Raises:
        BrokenEntryError: The arrays are inconsistent.
    """
    required = {"input_ids", "loss_mask", "rollout_logprobs", "offsets", "prompt_ids", "prompt_offsets", "records"}
    versions_name = "row_versions" if "row_versions" in arrays else "policy_versions"
    if set(arrays) - (EXPERTS if set(arrays) >= EXPERTS else set()) != required | {versions_name}:
        raise BrokenEntryError(path, f"it has the arrays {sorted(arrays)}; expected {sorted(required)} and versions")
    offsets = _checked_offsets(arrays["offsets"], arrays["input_ids"], path=f"{path}/offsets")
    prompt_offsets = _checked_offsets(arrays["prompt_offsets"], arrays["prompt_ids"], path=f"{path}/prompt_offsets")
    for name in ("loss_mask", "rollout_logprobs"):
        _check_length(arrays[name], len(arrays["input_ids"]), path=f"{path}/{name}")
    if arrays["loss_mask"].view(np.uint8).max(initial=0) > 1:  # numpy accepts any byte as bool, with undefined results
        raise BrokenEntryError(f"{path}/loss_mask", "its values must be 0 or 1")
    records = _decode_records(arrays["records"], path=f"{path}/records")
    rows = [row for group in records for session in group.sessions for row in session.trajectories]
    _check_length(offsets, len(rows) + 1, path=f"{path}/offsets")
    _check_length(prompt_offsets, len(records) + 1, path=f"{path}/prompt_offsets")
    versions = arrays[versions_name]
    if versions_name == "row_versions":
        _check_length(versions, len(rows), path=f"{path}/row_versions")
        versions = _token_versions(versions, arrays["loss_mask"], offsets)
    _check_length(versions, len(arrays["input_ids"]), path=f"{path}/{versions_name}")
    tokens = {**{name: arrays[name] for name in TOKEN_DTYPES if name in arrays}, "policy_versions": versions}
    prompts = arrays["prompt_ids"], prompt_offsets.tolist()
    experts = _split_experts(arrays, np.diff(offsets), path=path)
    return _joined_groups(records, tokens, experts, offsets.tolist(), prompts)


def _joined_groups(
    records: Sequence[_GroupRecord],
    tokens: Arrays,
    experts: Sequence[ExpertArray | None],
    ends: Sequence[int],
    prompts: tuple[NDArray[Any], Sequence[int]],
) -> list[GroupResult]:
    groups, row = [], 0
    for number, record in enumerate(records):
        sessions = []
        for session_index, session in enumerate(record.sessions):
            trajectories = []
            for output_index, each in enumerate(session.trajectories):
                place = slice(ends[row], ends[row + 1])
                trajectories.append(
                    Trajectory(
                        prompt_uid=record.uid,
                        session_index=session_index,
                        output_index=output_index,
                        **{name: values[place] for name, values in tokens.items()},
                        finish_reason=cast(FinishReason, each.finish_reason),
                        parent=each.parent,
                        reward=each.reward,
                        reward_components=each.reward_components,
                        timings=Timings(
                            generate_s=each.timings[0],
                            tools_s=each.timings[1],
                            reward_s=each.timings[2],
                            preemptions=each.timings[3],
                        ),
                        extras=each.extras,
                        routed_experts=experts[row],
                    )
                )
                row += 1
            sessions.append(SessionResult(trajectories=tuple(trajectories), failure=session.failure))
        ids, starts = prompts
        prompt = Prompt(
            uid=record.uid,
            input_ids=ids[starts[number] : starts[number + 1]],
            messages=tuple(record.messages),
            data_source=record.data_source,
            ground_truth=record.ground_truth,
            columns=record.columns,
        )
        groups.append(
            GroupResult(
                prompt=prompt,
                sessions=tuple(sessions),
                num_audited=record.num_audited,
                num_audit_failures=record.num_audit_failures,
            )
        )
    return groups


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
    parts = np.split(values, np.cumsum(sizes[:-1]))
    pairs = zip(parts, lengths, shapes.reshape(-1, 2), strict=True)
    return [part.reshape(length, *shape) if shape.any() else None for part, length, shape in pairs]


def _storable(session: SessionResult, group: GroupResult, index: int) -> SessionResult:
    if session.failure is None or not session.trajectories:
        return session
    try:
        _check_rows(session, group, index)
        for row in session.trajectories:
            msgspec.convert(json.loads(json.dumps(_trajectory_record(row))), _TrajectoryRecord)
    except Exception:  # results of a custom loop can raise any error when they are read
        return replace(session, trajectories=())
    return session


def _check_rows(session: SessionResult, group: GroupResult, index: int) -> None:
    """Raise an error if a trajectory's prompt uid or indices do not match its position."""
    for output_index, row in enumerate(session.trajectories):
        expected = (group.prompt.uid, index, output_index)
        found = (row.prompt_uid, row.session_index, row.output_index)
        if found != expected:
            raise CacheError(
                "prompt_uid, session_index and output_index of a trajectory must match its position: expected "
                f"{expected}; found {found}. Fix them in the agent loop."
            )


def _trajectories(groups: Sequence[GroupResult]) -> list[Trajectory]:
    """Return the trajectories of all sessions, including failed ones."""
    return [row for group in groups for session in group.sessions for row in session.trajectories]


def _joined(rows: Sequence[Trajectory | Prompt], name: str, dtype: str) -> NDArray[Any]:
    parts = [getattr(row, name) for row in rows]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _row_versions(rows: Sequence[Trajectory]) -> NDArray[np.int32] | None:
    """Return the [N] version of each trajectory; None if any trajectory has several."""
    found = np.full(len(rows), NO_VERSION, dtype=np.int32)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part, part_found = rows[start : start + ROWS_AT_ONCE], found[start : start + ROWS_AT_ONCE]
        versions = np.concatenate([row.policy_versions for row in part])
        mask = np.concatenate([row.loss_mask for row in part])
        offsets = offsets_of([len(row.policy_versions) for row in part])
        has_tokens = offsets[1:] > offsets[:-1]
        if has_tokens.any():
            part_found[has_tokens] = np.maximum.reduceat(versions, offsets[:-1][has_tokens])
        if not np.array_equal(_token_versions(part_found, mask, offsets), versions):
            return None
    return found


def _token_versions(
    row_versions: NDArray[np.int32], mask: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the [T] version of each token, expanded from one version per trajectory; NO_VERSION if not sampled."""
    found = np.empty(len(mask), dtype=np.int32)
    for start in range(0, len(row_versions), ROWS_AT_ONCE):
        ends = offsets[start : start + ROWS_AT_ONCE + 1]
        place = slice(ends[0], ends[-1])
        repeated = np.repeat(row_versions[start : start + ROWS_AT_ONCE], np.diff(ends))
        found[place] = np.where(mask[place], repeated, np.int32(NO_VERSION))
    return found


def _encode_records(groups: Sequence[GroupResult]) -> bytes:
    parts = []
    for group in groups:
        record = _group_record(group)
        try:
            parts.append(json.dumps(record))
            msgspec.convert(record, _GroupRecord)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            name = next((name for name, value in record.items() if not _is_json(value)), "record")
            raise CacheError(
                f"{name} of prompt {group.prompt.uid!r} cannot be stored: it must be JSON ({error}). Remove it from "
                "the prompt's row or from the agent loop's result."
            ) from error
    raw = f"[{','.join(parts)}]".encode()
    if len(raw) > MAX_RECORDS_BYTES or count_values(raw) > MAX_RECORDS_VALUES:
        raise CacheError(
            f"the records other than tokens have {len(raw)} bytes of JSON with up to {count_values(raw)} values; an "
            f"entry may have at most {MAX_RECORDS_BYTES} bytes and {MAX_RECORDS_VALUES} values. Drop unused columns of "
            "the prompts, or store fewer prompts per entry."
        )
    return raw


def _group_record(group: GroupResult) -> dict[str, Json]:
    return {
        "uid": group.prompt.uid,
        "messages": [dict(message) for message in group.prompt.messages],
        "data_source": group.prompt.data_source,
        "ground_truth": group.prompt.ground_truth,
        "columns": dict(group.prompt.columns),
        "num_audited": group.num_audited,
        "num_audit_failures": group.num_audit_failures,
        "sessions": [
            {"failure": session.failure, "trajectories": [_trajectory_record(row) for row in session.trajectories]}
            for session in group.sessions
        ],
    }


def _trajectory_record(row: Trajectory) -> dict[str, Json]:
    timings = row.timings
    return {
        "finish_reason": row.finish_reason,
        "reward": row.reward,
        "reward_components": dict(row.reward_components),
        "timings": [timings.generate_s, timings.tools_s, timings.reward_s, timings.preemptions],
        "extras": dict(row.extras),
        **({} if row.parent is None else {"parent": row.parent}),
    }


def _is_json(value: Json) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _decode_records(raw: NDArray[np.uint8], *, path: str) -> list[_GroupRecord]:
    if len(raw) > MAX_RECORDS_BYTES:
        raise BrokenEntryError(path, f"it has {len(raw)} bytes; expected at most {MAX_RECORDS_BYTES}")
    try:
        records = load_json_as(raw.tobytes(), list[_GroupRecord], max_values=MAX_RECORDS_VALUES)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise BrokenEntryError(path, f"it cannot be read ({type(error).__name__}: {error})") from None
    known = get_args(FinishReason)
    for record in records:
        for session in record.sessions:
            for row in session.trajectories:
                if row.finish_reason not in known:
                    raise BrokenEntryError(
                        path, f"finish_reason must be one of {known}; found {preview(row.finish_reason)}"
                    )
    return records


def _checked_offsets(offsets: NDArray[np.int64], values: NDArray[Any], *, path: str) -> NDArray[np.int64]:
    is_whole = len(offsets) >= 1 and offsets[0] == 0 and offsets[-1] == len(values)
    if not is_whole or bool((offsets[1:] < offsets[:-1]).any()):
        raise BrokenEntryError(path, f"offsets must rise from 0 to {len(values)}")
    return offsets


def _check_length(array: NDArray[Any], length: int, *, path: str) -> None:
    if len(array) != length:
        raise BrokenEntryError(path, f"it has {len(array)} values; expected {length}")
