"""Converts groups of rollouts to flat arrays and back. `error`, `rescored` and `timings.reward_wait_s` are not stored.

The tokens of all trajectories are concatenated, with offsets; so are the prompts' tokens. Everything else (uids,
messages, rewards, timings, failures) is one JSON document, stored as bytes. A trajectory's uid and indices follow from
its position there.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import sha256
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.data import ImageSpan, Json, Prompt, Timings, Trajectory, offsets_of
from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files import count_values, load_json, preview
from rl_core.images import ImageStore
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
NUCLEUS_DTYPES = {"nucleus_ids": "int32", "nucleus_widths": "int32"}
"""`nucleus_widths` has K of each trajectory, 0 for one without nuclei; an entry without any has none."""
INDICES = (("routed_experts", "expert_shapes", 2), ("nucleus_ids", "nucleus_widths", 1))
"""Names of columns with several values per token and of their shapes, and the number of axes of a token's values."""
IMAGE_DTYPES = {"images": "uint8", "image_offsets": "int64"}
"""Encoded images of the prompts and trajectories, each once; an entry without any has none."""
DTYPES = {**TOKEN_DTYPES, **OTHER_DTYPES, **EXPERT_DTYPES, **NUCLEUS_DTYPES, **IMAGE_DTYPES}
"""dtype of every array that an entry may have."""
PLACE = ("prompt_uid", "session_index", "output_index")
NOT_IN_RECORDS = ("error", "rescored", "reward_wait_s", *PLACE, *TOKEN_DTYPES, "routed_experts", "nucleus_ids")
RECORD_FIELDS: dict[type, list[str]] = {
    kind: [field.name for field in fields(kind) if field.name not in NOT_IN_RECORDS]
    for kind in (GroupResult, Prompt, SessionResult, Trajectory, Timings, ImageSpan)
}
"""Fields in the JSON document, of each type of record."""
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


def image_digests(groups: Sequence[GroupResult]) -> list[str]:
    """Return the digest of each image of the prompts and trajectories once, sorted."""
    of_rows = [*(group.prompt.images for group in groups), *(row.images for row in _trajectories(groups))]
    return sorted({image.digest for images in of_rows for image in images})


def iter_arrays(
    groups: Sequence[GroupResult], *, images: ImageStore | None = None
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the 1-D array of each column; one can be stored while the next is built.

    Args:
        groups: The groups.
        images: Where their images are.

    Raises:
        CacheError: A field of a prompt or trajectory is not JSON, the indices of a trajectory do not match its
            position, or the records are too large; the message names it.
    """
    trajectories, prompts = _trajectories(groups), [group.prompt for group in groups]
    for name, dtype in TOKEN_DTYPES.items():
        yield name, _joined(trajectories, name, dtype)
    for name, shapes, num_axes in INDICES:
        given = [getattr(row, name) for row in trajectories]
        if any(one is not None for one in given):
            empty = np.zeros((0,) * (1 + num_axes), DTYPES[name])
            indices = [empty if one is None else one for one in given]
            yield name, np.concatenate([one.reshape(-1) for one in indices])
            yield shapes, np.array([one.shape[1:] for one in indices], np.int32).reshape(-1)
    yield "records", np.frombuffer(_encode_records(groups), dtype=np.uint8)
    yield "offsets", offsets_of([len(trajectory.input_ids) for trajectory in trajectories])
    yield "prompt_ids", _joined(prompts, "input_ids", "int32")
    yield "prompt_offsets", offsets_of([len(prompt.input_ids) for prompt in prompts])
    if digests := image_digests(groups):
        if images is None:
            raise CacheError("groups with images need the store that has them. Pass images=... to SkipCache.")
        encoded = [images.get(digest) for digest in digests]
        yield "images", np.frombuffer(b"".join(encoded), dtype=np.uint8)
        yield "image_offsets", offsets_of(list(map(len, encoded)))


def decode_groups(arrays: Arrays, *, path: str) -> list[GroupResult]:
    """Rebuild the groups from their arrays.

    Args:
        arrays: Arrays from `iter_arrays`, by name, with their dtypes already checked.
        path: The entry's path, for error messages.

    Raises:
        BrokenEntryError: The arrays are inconsistent.
    """
    required = TOKEN_DTYPES.keys() | OTHER_DTYPES.keys()
    optional = [kind.keys() for kind in (EXPERT_DTYPES, NUCLEUS_DTYPES, IMAGE_DTYPES) if kind.keys() & arrays.keys()]
    if arrays.keys() != required.union(*optional):
        raise BrokenEntryError(path, f"it has the arrays {sorted(arrays)}; expected {sorted(required)}")
    for name in TOKEN_DTYPES:
        _check_length(arrays[name], len(arrays["input_ids"]), path=f"{path}/{name}")
    if arrays["loss_mask"].view(np.uint8).max(initial=0) > 1:  # numpy accepts any byte as bool, with undefined results
        raise BrokenEntryError(f"{path}/loss_mask", "its values must be 0 or 1")
    rows = _split(arrays, "input_ids", "offsets", tuple(TOKEN_DTYPES), path=path)
    prompts = _split(arrays, "prompt_ids", "prompt_offsets", ("prompt_ids",), path=path)
    for name, shapes, num_axes in INDICES:
        found = _split_indices(arrays, np.diff(arrays["offsets"]), name, shapes, num_axes, path=path)
        for row, indices in zip(rows, found, strict=True):
            row[name] = indices
    try:
        if len(arrays["records"]) > MAX_RECORDS_BYTES:
            raise ValueError(f"it has {len(arrays['records'])} bytes; expected at most {MAX_RECORDS_BYTES}")
        records = load_json(arrays["records"].tobytes(), max_values=MAX_RECORDS_VALUES)
        _fill_records(records, rows, prompts)
        groups: list[GroupResult] = msgspec.convert(records, list[GroupResult], dec_hook=lambda _, value: value)
    except Exception as error:  # records of another form raise many types
        shown = preview(str(error), most=MAX_SHOWN)[1:-1]
        raise BrokenEntryError(f"{path}/records", f"it cannot be read ({type(error).__name__}: {shown})") from None
    return groups


def decode_images(arrays: Arrays, groups: Sequence[GroupResult], *, path: str) -> list[bytes]:
    """Return the encoded images of an entry.

    Args:
        arrays: As for `decode_groups`.
        groups: The groups that it returned.
        path: The entry's path, for error messages.

    Raises:
        BrokenEntryError: They are not the images of the groups.
    """
    found = []
    if "images" in arrays:
        parts = _split(arrays, "images", "image_offsets", ("images",), path=path)
        found = [part["images"].tobytes() for part in parts]
    if [sha256(data).hexdigest() for data in found] != image_digests(groups):
        raise BrokenEntryError(f"{path}/images", "it must have the images of the groups, each once")
    return found


def _fill_records(records: Any, rows: Sequence[dict[str, Any]], prompts: Sequence[dict[str, Any]]) -> None:
    """Add the arrays of prompts and trajectories to the records, and the trajectories' places.

    Raises:
        ValueError: The records have another number of prompts or trajectories.
    """
    trajectories = [
        (trajectory, record["prompt"]["uid"], index, output_index)
        for record in records
        for index, session in enumerate(record["sessions"])
        for output_index, trajectory in enumerate(session["trajectories"])
    ]
    found, expected = (len(trajectories), len(records)), (len(rows), len(prompts))
    if found != expected:
        raise ValueError("it has {} trajectories of {} prompts; expected {} of {}".format(*found, *expected))
    for record, prompt in zip(records, prompts, strict=True):
        record["prompt"]["input_ids"] = prompt["prompt_ids"]
    for (trajectory, uid, index, output_index), row in zip(trajectories, rows, strict=True):
        trajectory.update(row, prompt_uid=uid, session_index=index, output_index=output_index)


def _split(arrays: Arrays, values: str, offsets: str, names: Sequence[str], *, path: str) -> list[dict[str, Any]]:
    """Return the part of each array that belongs to each row."""
    ends, total = arrays[offsets], len(arrays[values])
    is_whole = len(ends) >= 1 and ends[0] == 0 and ends[-1] == total
    if not is_whole or bool((ends[1:] < ends[:-1]).any()):
        raise BrokenEntryError(f"{path}/{offsets}", f"offsets must rise from 0 to {total}")
    places = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    return [{name: arrays[name][start:stop] for name in names} for start, stop in places]


def _split_indices(
    arrays: Arrays, lengths: NDArray[np.int64], name: str, shapes_name: str, num_axes: int, *, path: str
) -> list[NDArray[Any] | None]:
    """Return the [T, ...] indices of each trajectory; None for one without; see `INDICES`."""
    if name not in arrays:
        return [None] * len(lengths)
    values, shapes = arrays[name], arrays[shapes_name].astype(np.int64)
    _check_length(shapes, num_axes * len(lengths), path=f"{path}/{shapes_name}")
    shapes = shapes.reshape(-1, num_axes)
    sizes = [math.prod(map(int, (length, *shape))) for length, shape in zip(lengths, shapes, strict=True)]
    if shapes.min(initial=0) < 0:
        raise BrokenEntryError(f"{path}/{shapes_name}", "a shape must not be negative")
    _check_length(values, sum(sizes), path=f"{path}/{name}")
    pairs = zip(np.cumsum([0, *sizes]).tolist(), sizes, lengths, shapes, strict=False)
    return [
        values[start : start + size].reshape(length, *shape) if shape.any() else None
        for start, size, length, shape in pairs
    ]


def _storable(session: SessionResult, group: GroupResult, index: int) -> SessionResult:
    if session.failure is None:
        return session
    try:
        _check_places(session, group, index)
        json.dumps(session, default=_record_fields)
    except Exception:  # results of a custom loop can raise any error when they are read
        return replace(session, trajectories=())
    return session


def _check_places(session: SessionResult, group: GroupResult, index: int) -> None:
    """Raise ValueError if a trajectory's prompt uid or indices do not match its position."""
    for output_index, row in enumerate(session.trajectories):
        expected = (group.prompt.uid, index, output_index)
        found = (row.prompt_uid, row.session_index, row.output_index)
        if found != expected:
            raise ValueError(f"{', '.join(PLACE)} of a trajectory must be {preview(expected)}; found {preview(found)}")


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
            for index, session in enumerate(group.sessions):
                _check_places(session, group, index)
            parts.append(json.dumps(group, default=_record_fields))
        except (TypeError, ValueError, RecursionError) as error:
            raise CacheError(
                f"the rollouts of prompt {group.prompt.uid!r} cannot be stored: {error}. Fix the prompt's row or the "
                "agent loop's result: all their values must be JSON."
            ) from error
    raw = f"[{','.join(parts)}]".encode()
    if len(raw) > MAX_RECORDS_BYTES or count_values(raw) > MAX_RECORDS_VALUES:
        raise CacheError(
            f"the records other than tokens have {len(raw)} bytes of JSON with up to {count_values(raw)} values; an "
            f"entry may have at most {MAX_RECORDS_BYTES} bytes and {MAX_RECORDS_VALUES} values. Drop unused columns of "
            "the prompts, or store fewer prompts per entry."
        )
    return raw


def _record_fields(value: object) -> dict[str, Json]:
    """Return a record as a JSON object, for `json.dumps`."""
    if isinstance(value, Mapping):
        return dict(value)
    if type(value) not in RECORD_FIELDS:
        raise TypeError(f"a value of type {type(value).__name__} is not JSON")
    return {name: getattr(value, name) for name in RECORD_FIELDS[type(value)]}


def _check_length(array: NDArray[Any], length: int, *, path: str) -> None:
    if len(array) != length:
        raise BrokenEntryError(path, f"it has {len(array)} values; expected {length}")
