"""Entries of arrays that are changed, with valid checksums."""

import json
import random
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.files import entry_zip
from rl_core.files.durable import checksum

ROOT = entry_zip.METADATA
BLOSC = {
    "version": (0, "<B"),
    "flags": (2, "<B"),
    "typesize": (3, "<B"),
    "num_bytes": (4, "<I"),
    "block_bytes": (8, "<I"),
    "compressed_bytes": (12, "<I"),
}
"""Position and format of the fields in the header of a compressed chunk."""


class Forgery:
    """The files in an entry's zip, to be changed; `save` writes them with valid checksums.

    Attributes:
        files: Content by name.
        directory: Fields of `zipfile.ZipInfo`, by name of the file, that the zip's directory declares falsely.
        doubled: Names of files that are written twice.
    """

    def __init__(self, entry: Path) -> None:
        self.entry = entry
        with zipfile.ZipFile(entry) as archive:
            self.files = {member.filename: archive.read(member) for member in archive.infolist()}
        self.directory: dict[str, dict[str, Any]] = {}
        self.doubled: list[str] = []

    @property
    def description(self) -> dict[str, Any]:
        return json.loads(self.files[ROOT])["attributes"]

    def describe(self, **fields: Any) -> None:
        """Change fields of the description."""
        self.put_description({**self.description, **fields})

    def put_description(self, content: Any) -> None:
        root = {"zarr_format": 3, "node_type": "group", "attributes": content}
        self.files[ROOT] = content if isinstance(content, bytes) else json.dumps(root).encode()

    def metadata(self, name: str) -> dict[str, Any]:
        return json.loads(self.files[f"{name}/{ROOT}"])

    def put_metadata(self, name: str, content: Mapping[str, Any] | bytes) -> None:
        self.files[f"{name}/{ROOT}"] = content if isinstance(content, bytes) else json.dumps(content).encode()

    def change_metadata(self, name: str, **fields: Any) -> None:
        self.put_metadata(name, {**self.metadata(name), **fields})

    def chunk(self, name: str, index: int = 0) -> bytes:
        """Return a chunk without its checksum."""
        return self.files[f"{name}/c/{index}"][:-4]

    def put_chunk(self, name: str, body: bytes, index: int = 0) -> None:
        self.files[f"{name}/c/{index}"] = body + checksum(body).to_bytes(4, "little")

    def change_header(self, name: str, **fields: int) -> None:
        """Change the header of a compressed chunk."""
        body = bytearray(self.chunk(name))
        for field, value in fields.items():
            place, code = BLOSC[field]
            struct.pack_into(code, body, place, value)
        self.put_chunk(name, bytes(body))

    def put_array(self, name: str, values: np.ndarray, *, compress: bool = True) -> None:
        """Replace or add an array."""
        self.files = {file: content for file, content in self.files.items() if not file.startswith(f"{name}/")}
        made = entry_zip._encode(name, values, compress=compress)
        self.files |= {file: bytes(content) for file, content in made}

    def save(self, entry: Path | None = None) -> None:
        with zipfile.ZipFile(entry or self.entry, "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that are written twice
            for name in (*self.files, *self.doubled):
                member = zipfile.ZipInfo()
                member.filename = name  # the constructor would cut it at a zero byte
                archive.writestr(member, self.files[name])
            for member in archive.filelist:
                for field, value in self.directory.get(member.filename, {}).items():
                    setattr(member, field, value)


def place_in(entry: Path, file: str) -> tuple[int, int]:
    """Return where the content of a file in an entry's zip begins and ends."""
    with zipfile.ZipFile(entry) as archive, entry.open("rb") as stream:
        member = archive.getinfo(file)
        stream.seek(member.header_offset)
        header = stream.read(zipfile.sizeFileHeader)
        name_bytes, extra_bytes = struct.unpack("<HH", header[-4:])
        start = member.header_offset + len(header) + name_bytes + extra_bytes
        return start, start + member.file_size


def flip(entry: Path, file: str) -> None:
    """Flip a bit in the middle of a file in an entry's zip."""
    start, stop = place_in(entry, file)
    content = bytearray(entry.read_bytes())
    content[(start + stop) // 2] ^= 4
    entry.write_bytes(content)


def damaged(draws: random.Random, content: bytes) -> tuple[str, bytes]:
    """Return a random damage of a file: its name, and the file's new content."""
    place, size = draws.randrange(len(content)), len(content)
    length = min(draws.choice((1, 16, 512)), size - place)
    other = draws.randrange(size - length + 1)
    changed = bytearray(content)
    kind = draws.choice(("flip", "flip", "flip", "cut", "zeros", "copy", "swap", "insert", "append"))
    if kind == "flip":
        changed[place] ^= 1 << draws.randrange(8)
    elif kind == "cut":
        del changed[place:]
    elif kind == "zeros":
        changed[place : place + length] = bytes(length)
    elif kind == "copy":
        changed[place : place + length] = content[other : other + length]
    elif kind == "swap":
        changed[place : place + length] = content[other : other + length]
        changed[other : other + length] = content[place : place + length]
    elif kind == "insert":
        changed[place:place] = draws.randbytes(length)
    else:
        changed += content[place:]
    return kind, bytes(changed)
