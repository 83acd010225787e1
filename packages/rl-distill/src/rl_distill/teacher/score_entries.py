"""Entries of a score cache on disk: zarr arrays of many trajectories, written atomically, read in parts and verified.

An entry is a folder: `manifest.json` with the checksum of every file, and one-dimensional arrays. `keys` has 32 bytes
per trajectory, and `counts` the number of its trained tokens; `logprobs`, `token_ids` and `hidden` concatenate the
trained tokens of all trajectories.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.errors import BrokenEntryError, CacheError, CheckpointError, MissingExtraError
from rl_core.files import load_json, locked_folder, open_plain, sync_folder
from rl_core.files.zarr_arrays import (
    METADATA,
    ArraySpec,
    check_metadata,
    check_sizes,
    decode_array,
    decode_chunk,
    encode_array,
    plan_array,
)
from rl_distill.teacher.scores import TeacherScores

FORMAT = "rl-distill teacher scores"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES, MAX_MANIFEST_VALUES = 1 << 24, 1 << 20
MAX_ENTRY_BYTES = 1 << 32
CHUNK_BYTES = 1 << 19
"""Chunk size of arrays that are read in parts; 512 tokens with the top 64 tokens each have 133 KB per array."""
KEY_BYTES = 32
DTYPES = {"keys": "uint8", "counts": "int32", "logprobs": "float32", "token_ids": "int32", "hidden": "float32"}
NAME = re.compile(r"scores-[0-9a-f]{16}")
WRITING, BROKEN = ".writing-", "broken"

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class EntryManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of an entry.

    Attributes:
        format: Always FORMAT.
        format_version: Always FORMAT_VERSION.
        num_rows: Number of trajectories.
        width: K + 1.
        hidden_size: H; 0 without hidden states.
        arrays: Specification of each array by name.
    """

    format: str
    format_version: int
    num_rows: Count
    width: Count
    hidden_size: Count
    arrays: dict[str, ArraySpec]


class ScoreEntry:
    """An entry with its keys in memory; scores are read on demand."""

    def __init__(self, path: Path) -> None:
        """Read the manifest and the keys.

        Raises:
            BrokenEntryError: The folder is not an entry, or is incomplete.
            MissingExtraError: The library of zarr's codecs is not installed.
        """
        self.path = path
        self._manifest = manifest = _read_manifest(path)
        raw = self._whole("keys").tobytes()
        self.keys = [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
        counts = self._whole("counts").astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        is_possible = int(counts.min(initial=0)) >= 0
        if not is_possible or self._starts[-1] * manifest.width != self._length("logprobs"):
            raise BrokenEntryError(str(path), "its token counts do not match its logprobs")
        for name in self._parts:
            where = f"{path}/{name}"
            content = _read(path / name / METADATA, manifest.arrays[name].metadata.size_bytes)
            check_metadata(bytes(content), manifest.arrays[name], path=where)

    def read(self, rows: Sequence[int]) -> list[TeacherScores]:
        """Return the scores of the trajectories with these indices, at their trained tokens; each chunk is read once.

        Raises:
            BrokenEntryError: A file is missing or invalid.
        """
        values = {name: self._slices(name, rows, width) for name, width in self._parts.items()}
        hidden = values.get("hidden")
        return [
            TeacherScores(logprobs=logprobs, token_ids=ids, hidden=None if hidden is None else hidden[number])
            for number, (logprobs, ids) in enumerate(zip(values["logprobs"], values["token_ids"], strict=True))
        ]

    @property
    def _parts(self) -> Mapping[str, int]:
        """Values per token in each array that is read in parts."""
        manifest = self._manifest
        parts = {"logprobs": manifest.width, "token_ids": manifest.width}
        return parts | ({"hidden": manifest.hidden_size} if manifest.hidden_size else {})

    def _length(self, name: str) -> int:
        return self._manifest.arrays[name].shape[0]

    def _whole(self, name: str) -> NDArray[Any]:
        spec, folder = self._manifest.arrays[name], self.path / name
        files = {METADATA: _read(folder / METADATA, spec.metadata.size_bytes)}
        for index, chunk in enumerate(spec.chunks):
            files[f"c/{index}"] = _read(folder / "c" / str(index), chunk.size_bytes)
        return decode_array(files, spec, path=str(folder))

    def _slices(self, name: str, rows: Sequence[int], width: int) -> list[NDArray[Any]]:
        spec, folder = self._manifest.arrays[name], self.path / name
        chunks: dict[int, NDArray[Any]] = {}
        found = []
        for row in rows:
            start, stop = int(self._starts[row]) * width, int(self._starts[row + 1]) * width
            values = np.empty(stop - start, dtype=spec.dtype)
            for index in range(start // spec.chunk_length, -(-stop // spec.chunk_length)):
                if index not in chunks:
                    content = _read(folder / "c" / str(index), spec.chunks[index].size_bytes)
                    chunks[index] = decode_chunk(content, index, spec, path=str(folder))
                at = index * spec.chunk_length
                first, last = max(start, at), min(stop, at + spec.chunk_length)
                values[first - start : last - start] = chunks[index][first - at : last - at]
            found.append(values.reshape(-1, width))
        return found


def require_library() -> None:
    """Check early that the library of zarr's codecs is installed.

    Raises:
        MissingExtraError: It is not installed.
    """
    sample = np.zeros(1, dtype=np.uint8)
    try:
        encode_array(sample, plan_array(sample, compress=True))
    except MissingExtraError as error:
        raise MissingExtraError(
            "a cache of teachers' scores needs zarr's codecs. Install the extra rl-distill[cache]; see the README."
        ) from error


def entry_names(folder: Path) -> list[str]:
    """Return the names of folders that look like entries."""
    try:
        return sorted(name for name in os.listdir(folder) if NAME.fullmatch(name))  # noqa: PTH208 - only names are needed
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CacheError(f"{folder} cannot be read: {error.strerror}.") from error


def write_entry(folder: Path, rows: Mapping[bytes, TeacherScores]) -> str:
    """Write trajectories as a new entry: built under a lock, flushed, and renamed into place.

    Args:
        folder: Folder of the entries.
        rows: Scores at trained tokens by key; at least one trajectory, all of the same width.

    Returns:
        The entry's name.

    Raises:
        CacheError: The entry cannot be written; no part of it remains.
        MissingExtraError: The library of zarr's codecs is not installed.
    """
    token = secrets.token_hex(8)
    try:
        with locked_folder(folder, WRITING) as aside:
            manifest = _write_arrays(aside, rows)
            _write(aside / MANIFEST, _encode_manifest(manifest))
            for path, _, _ in os.walk(aside):
                sync_folder(path)
            aside.rename(folder / f"scores-{token}")
            sync_folder(folder)
    except OSError as error:
        raise CacheError(
            f"cannot store the scores of {len(rows)} trajectories in {folder}: {error}. Free disk space, choose "
            "another distillation.cache, or omit it."
        ) from error
    return f"scores-{token}"


def set_aside(path: Path) -> Path | None:
    """Move a damaged entry into `broken`, and return its new path; None if it no longer exists."""
    target = path.parent / BROKEN / f"{path.name}-{secrets.token_hex(8)}"
    try:
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"{path} is damaged and cannot be moved to {target.parent}: {error}. Remove it.") from error
    return target


def _write_arrays(aside: Path, rows: Mapping[bytes, TeacherScores]) -> EntryManifest:
    stored = list(rows.values())
    arrays: dict[str, NDArray[Any]] = {
        "keys": np.frombuffer(b"".join(rows), dtype=np.uint8),
        "counts": np.asarray([len(row.logprobs) for row in stored], dtype=np.int32),
        "logprobs": np.concatenate([row.logprobs.reshape(-1) for row in stored]),
        "token_ids": np.concatenate([row.token_ids.reshape(-1) for row in stored]),
    }
    states = [row.hidden for row in stored if row.hidden is not None]
    if states:
        arrays["hidden"] = np.concatenate([state.reshape(-1) for state in states])
    specs = {}
    for name, array in arrays.items():
        chunk_bytes = CHUNK_BYTES if name in ("logprobs", "token_ids", "hidden") else None
        specs[name], files = encode_array(array, plan_array(array, compress=True, chunk_bytes=chunk_bytes))
        (aside / name / "c").mkdir(parents=True)
        for file, parts in files.items():
            _write(aside / name / file, *parts)
    return EntryManifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        num_rows=len(stored),
        width=stored[0].logprobs.shape[1],
        hidden_size=states[0].shape[1] if states else 0,
        arrays=specs,
    )


def _write(file: Path, *parts: bytes | memoryview) -> None:
    with file.open("xb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())


def _read(file: Path, size_bytes: int) -> memoryview:
    """Read a file of a known size into writable memory."""
    try:
        with open_plain(file, error=CheckpointError, follows_links=False) as (stream, size):
            if size != size_bytes:
                raise BrokenEntryError(str(file), f"it must have {size_bytes} bytes; found {size}")
            content = np.empty(size_bytes, dtype=np.uint8).data
            if cast(BufferedReader, stream).readinto(content) != size_bytes:
                raise BrokenEntryError(str(file), f"expected {size_bytes} bytes, but fewer could be read")
    except (CheckpointError, OSError) as error:
        raise BrokenEntryError(str(file), f"it must be a readable regular file: {error}") from None
    return content


def _encode_manifest(manifest: EntryManifest) -> bytes:
    content = msgspec.to_builtins(manifest)
    return json.dumps({"sha256": _sha256(content), "manifest": content}).encode()


def _read_manifest(path: Path) -> EntryManifest:
    file = path / MANIFEST
    try:
        with open_plain(file, error=CheckpointError, follows_links=False) as (stream, size):
            if size > MAX_MANIFEST_BYTES:
                raise BrokenEntryError(str(file), f"it must have at most {MAX_MANIFEST_BYTES} bytes; found {size}")
            raw = stream.read(size)
        document = load_json(raw, max_values=MAX_MANIFEST_VALUES)
        if set(document) != {"sha256", "manifest"} or document["sha256"] != _sha256(document["manifest"]):
            raise BrokenEntryError(str(file), "its checksum does not match its content")
        manifest = msgspec.convert(document["manifest"], EntryManifest)
    except (CheckpointError, OSError, ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise BrokenEntryError(str(file), f"it is not a manifest ({type(error).__name__}: {error})") from None
    _check(manifest, path)
    return manifest


def _check(manifest: EntryManifest, path: Path) -> None:
    """Check the format and the sizes before any array is read."""
    expected = {name: dtype for name, dtype in DTYPES.items() if name != "hidden" or manifest.hidden_size}
    found = {name: spec.dtype for name, spec in manifest.arrays.items()}
    if (manifest.format, manifest.format_version, found) != (FORMAT, FORMAT_VERSION, expected) or manifest.width < 1:
        raise BrokenEntryError(
            f"{path}/{MANIFEST}",
            f"it must have format {FORMAT!r}, version {FORMAT_VERSION}, with the arrays {expected}",
        )
    total = 0
    for name, spec in manifest.arrays.items():
        check_sizes(spec, path=f"{path}/{name}")
        total += spec.shape[0] * np.dtype(spec.dtype).itemsize
    shapes = {name: spec.shape[0] for name, spec in manifest.arrays.items()}
    num_tokens = shapes["logprobs"] // manifest.width
    wanted = {
        "keys": manifest.num_rows * KEY_BYTES,
        "counts": manifest.num_rows,
        "logprobs": num_tokens * manifest.width,
        "token_ids": num_tokens * manifest.width,
    }
    wanted |= {"hidden": num_tokens * manifest.hidden_size} if manifest.hidden_size else {}
    if shapes != wanted or total > MAX_ENTRY_BYTES:
        raise BrokenEntryError(
            str(path),
            f"its arrays have {shapes} values, {total} bytes; expected {wanted} and at most {MAX_ENTRY_BYTES} bytes",
        )


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
