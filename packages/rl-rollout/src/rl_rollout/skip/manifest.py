"""The manifest of an entry: its content, its origin, and the checksum of every file."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rl_core.data import Json
from rl_core.errors import BrokenEntryError, CacheError, DataError
from rl_core.files import count_values, load_json, shown
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
    """Which rollouts an entry holds.

    Attributes:
        kind: "train", "validation" and so on; entries of one kind never serve another.
        step: The trainer's step from 1, or in an asynchronous run the prompts' place in the order of feeding.
        part: Which call of that step from 0, where a step generates several times.
    """

    step: int
    kind: str = "train"
    part: int = 0

    def __post_init__(self) -> None:
        """Refuse a key that no folder's name can say.

        Raises:
            DataError: kind, step or part is impossible.
        """
        if KEY_NAME.fullmatch(self.name) is None:
            raise DataError(
                "an entry's key needs a kind of at most 31 small letters and underscores, a step from 0 to 10**12 - 1, "
                f"and a part from 0 to 10**6 - 1; found {shown((self.kind, self.step, self.part))}."
            )

    @property
    def name(self) -> str:
        """Name of the entry's folder."""
        return f"{self.kind}-{self.step:08d}-{self.part:04d}"

    @classmethod
    def parse(cls, name: str) -> "EntryKey | None":
        """The key that a folder's name says; None where it is no entry's name."""
        match = KEY_NAME.fullmatch(name)
        if match is None:
            return None
        key = cls(kind=match[1], step=int(match[2]), part=int(match[3]))
        return key if key.name == name else None


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much an entry holds."""

    groups: Count
    sessions: Count
    failed_sessions: Count
    trajectories: Count
    tokens: Count


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an entry holds.

    Attributes:
        format: Always FORMAT.
        format_version: Always FORMAT_VERSION.
        key: Which rollouts.
        created_at: Seconds since the epoch.
        generate_s: Seconds that their generation took.
        counts: How much there is.
        fingerprint: See `make_fingerprint`.
        arrays_folder: Where the arrays are.
        arrays: By name.
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
        """Bytes of all arrays as they are stored."""
        return sum(file.size_bytes for file in self.files().values())

    def files(self) -> dict[str, FileSpec]:
        """Every file beside the manifest, by its path in the entry."""
        found: dict[str, FileSpec] = {}
        for name, array in self.arrays.items():
            stem = f"{self.arrays_folder}/{name}"
            found[f"{stem}/zarr.json"] = array.metadata
            found |= {f"{stem}/c/{index}": chunk for index, chunk in enumerate(array.chunks)}
        return found


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's file, which carries its own checksum.

    Raises:
        CacheError: It is so large that it would not be read.
    """
    content = msgspec.to_builtins(manifest)
    raw = json.dumps({"sha256": _sha256(content), "manifest": content}, indent=1).encode()
    if len(raw) > MAX_MANIFEST_BYTES or count_values(raw) > MAX_MANIFEST_VALUES:
        raise CacheError(
            f"the manifest of {manifest.key.name} has {len(raw)} bytes and up to {count_values(raw)} values; at most "
            f"{MAX_MANIFEST_BYTES} and {MAX_MANIFEST_VALUES} are read. Store fewer prompts an entry, or make the "
            "fingerprint's parts shorter."
        )
    return raw


def decode_manifest(raw: bytes, *, path: str) -> Manifest:
    """Read a manifest's file; that the files are as it says is for the caller to see.

    Raises:
        BrokenEntryError: It is torn, of another format, or not a manifest.
    """
    try:
        document = load_json(raw, max_values=MAX_MANIFEST_VALUES)
        content = document["manifest"]
        if set(document) != {"sha256", "manifest"} or document["sha256"] != _sha256(content):
            raise BrokenEntryError(path, "its checksum is not that of its content")
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise BrokenEntryError(path, f"it must be of format {FORMAT!r}, and is not")
        if content.get("format_version") != FORMAT_VERSION:
            found = shown(content.get("format_version"))
            raise BrokenEntryError(path, f"it must have format_version {FORMAT_VERSION}; found {found}")
        return msgspec.convert(content, Manifest)
    except (ValueError, TypeError, KeyError, RecursionError, msgspec.MsgspecError) as error:
        raise BrokenEntryError(path, f"it is no manifest ({type(error).__name__}: {error})") from None


def _sha256(content: Json) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
