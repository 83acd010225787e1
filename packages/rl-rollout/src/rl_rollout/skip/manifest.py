"""The manifest of an entry: its content, its origin, and the checksum of every file."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rl_core.data import Json
from rl_core.errors import BrokenEntryError, CacheError, DataError
from rl_core.files import count_values, load_json, preview
from rl_core.files.zarr_arrays import ArraySpec, FileSpec

FORMAT = "rl-rollout skip cache entry"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 24
MAX_MANIFEST_VALUES = 1 << 19
KEY_NAME = re.compile(r"([a-z][a-z_]{0,30})-(\d{8,12})-(\d{4,6})")
TOKEN_BYTES = 8
ARRAYS_FOLDER = re.compile(r"arrays-[0-9a-f]{16}")


class EntryKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, order=True):
    """Key of an entry's rollouts.

    Attributes:
        kind: Purpose of the rollouts, such as "train" or "validation"; an entry is only replayed for its own kind.
        step: The trainer's step, from 1.
        part: Index from 0 of the generation call within the step.
    """

    step: int
    kind: str = "train"
    part: int = 0

    def __post_init__(self) -> None:
        """Check that a folder name can represent the key.

        Raises:
            DataError: kind, step or part is out of range.
        """
        if KEY_NAME.fullmatch(self.name) is None:
            raise DataError(
                "an entry's key needs a kind of at most 31 lowercase letters and underscores, a step from 0 to "
                f"10**12 - 1, and a part from 0 to 10**6 - 1; found {preview((self.kind, self.step, self.part))}."
            )

    @property
    def name(self) -> str:
        """Name of the entry's folder."""
        return f"{self.kind}-{self.step:08d}-{self.part:04d}"

    @classmethod
    def parse(cls, name: str) -> "EntryKey | None":
        """Return the key with this folder name; None if it is not the name of an entry."""
        match = KEY_NAME.fullmatch(name)
        if match is None:
            return None
        key = cls(kind=match[1], step=int(match[2]), part=int(match[3]))
        return key if key.name == name else None


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of an entry's content."""

    groups: Count
    sessions: Count
    failed_sessions: Count
    trajectories: Count
    tokens: Count


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of an entry's content and origin.

    Attributes:
        format: Always FORMAT.
        format_version: Always FORMAT_VERSION.
        key: Key of the rollouts.
        created_at: Creation time in seconds since the epoch.
        generate_s: Generation time of the rollouts in seconds.
        counts: Sizes of the content.
        fingerprint: Fingerprint from `make_fingerprint`.
        arrays_folder: Folder of the arrays, relative to the entry.
        arrays: dtype, shape and checksums of each array, by name.
    """

    format: str
    format_version: int
    key: EntryKey
    created_at: Seconds
    generate_s: Seconds
    counts: Counts
    fingerprint: dict[str, Any]
    arrays_folder: str
    arrays: dict[str, ArraySpec]

    @property
    def size_bytes(self) -> int:
        """Size of all stored arrays in bytes, after compression."""
        return sum(file.size_bytes for file in self.files().values())

    def files(self) -> dict[str, FileSpec]:
        """Return every file except the manifest, by its path relative to the entry."""
        found: dict[str, FileSpec] = {}
        for name, array in self.arrays.items():
            stem = f"{self.arrays_folder}/{name}"
            found[f"{stem}/zarr.json"] = array.metadata
            found |= {f"{stem}/c/{index}": chunk for index, chunk in enumerate(array.chunks)}
        return found


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest together with its checksum.

    Raises:
        CacheError: The manifest exceeds the size that `decode_manifest` accepts.
    """
    content = msgspec.to_builtins(manifest)
    raw = json.dumps({"sha256": _sha256(content), "manifest": content}, indent=1).encode()
    if len(raw) > MAX_MANIFEST_BYTES or count_values(raw) > MAX_MANIFEST_VALUES:
        raise CacheError(
            f"the manifest of {manifest.key.name} has {len(raw)} bytes and up to {count_values(raw)} values; at most "
            f"{MAX_MANIFEST_BYTES} bytes and {MAX_MANIFEST_VALUES} values are allowed. Store fewer prompts per entry, "
            "or shorten the parts of the fingerprint."
        )
    return raw


def decode_manifest(raw: bytes, *, path: str) -> Manifest:
    """Decode a manifest. The caller compares the entry's files with it.

    Raises:
        BrokenEntryError: The manifest is damaged, or of another format.
    """
    try:
        document = load_json(raw, max_values=MAX_MANIFEST_VALUES)
        content = document["manifest"]
        if set(document) != {"sha256", "manifest"} or document["sha256"] != _sha256(content):
            raise BrokenEntryError(path, "its checksum does not match its content")
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            found = preview(content.get("format") if isinstance(content, Mapping) else content)
            raise BrokenEntryError(path, f"its format must be {FORMAT!r}; found {found}")
        if content.get("format_version") != FORMAT_VERSION:
            found = preview(content.get("format_version"))
            raise BrokenEntryError(path, f"it must have format_version {FORMAT_VERSION}; found {found}")
        return msgspec.convert(content, Manifest)
    except (ValueError, TypeError, KeyError, RecursionError, msgspec.MsgspecError) as error:
        raise BrokenEntryError(path, f"it is not a manifest ({type(error).__name__}: {error})") from None


def _sha256(content: Json) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
