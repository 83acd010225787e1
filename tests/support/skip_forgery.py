"""Forged entries of a skip cache with valid checksums, and a child process that reads them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rl_core.files.zarr_arrays import encode_array, plan_array
from skip_groups import make_groups

from rl_core.files.durable import checksum
from rl_rollout.skip import EntryKey, EntryStore
from rl_rollout.skip.rows import iter_arrays

KEY = EntryKey(step=1)
READER = Path(__file__).with_name("skip_reader.py")
DEADLINE_S = 240.0


def file_spec(size_bytes: int | str, crc32c: int) -> dict[str, Any]:
    """Return a manifest's description of a file."""
    return {"size_bytes": size_bytes, "crc32c": crc32c}


class Forgery:
    """An entry on disk to be changed; `seal` updates all checksums."""

    def __init__(self, entry: Path) -> None:
        self.entry = entry
        self.manifest: dict[str, Any] = json.loads((entry / "manifest.json").read_bytes())["manifest"]

    @property
    def specs(self) -> dict[str, Any]:
        return self.manifest["arrays"]

    @property
    def arrays(self) -> Path:
        return self.entry / self.manifest["arrays_folder"]

    def metadata(self, name: str) -> dict[str, Any]:
        return json.loads((self.arrays / name / "zarr.json").read_bytes())

    def put_metadata(self, name: str, content: Mapping[str, Any] | bytes) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (self.arrays / name / "zarr.json").write_bytes(raw)
        self.specs[name]["metadata"] = file_spec(len(raw), checksum(raw))

    def change_metadata(self, name: str, **fields: Any) -> None:
        self.put_metadata(name, {**self.metadata(name), **fields})

    def chunk(self, name: str, index: int = 0) -> bytes:
        """Return a chunk without its checksum."""
        return (self.arrays / name / "c" / str(index)).read_bytes()[:-4]

    def put_chunk(self, name: str, body: bytes, index: int = 0) -> None:
        crc = checksum(body)
        (self.arrays / name / "c" / str(index)).write_bytes(body + crc.to_bytes(4, "little"))
        self.specs[name]["chunks"][index] = file_spec(len(body) + 4, crc)

    def put_array(self, name: str, values: np.ndarray, *, compress: bool = False) -> None:
        """Replace or add an array."""
        spec, files = encode_array(values, plan_array(values, compress=compress))
        shutil.rmtree(self.arrays / name, ignore_errors=True)
        for file, content in files.items():
            (self.arrays / name / file).parent.mkdir(parents=True, exist_ok=True)
            (self.arrays / name / file).write_bytes(b"".join(content))
        self.specs[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "chunk_length": spec.chunk_length,
            "is_compressed": compress,
            "metadata": file_spec(spec.metadata.size_bytes, spec.metadata.crc32c),
            "chunks": [file_spec(chunk.size_bytes, chunk.crc32c) for chunk in spec.chunks],
        }

    def records(self) -> Any:
        """Return the records of the groups that `make_entry` stores."""
        return json.loads(dict(iter_arrays(make_groups()))["records"].tobytes())

    def put_records(self, content: Any) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.put_array("records", np.frombuffer(raw, dtype=np.uint8), compress=True)

    def seal(self) -> None:
        canonical = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"))
        self.put_manifest({"sha256": hashlib.sha256(canonical.encode()).hexdigest(), "manifest": self.manifest})

    def put_manifest(self, content: Any) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (self.entry / "manifest.json").write_bytes(raw)


@dataclass(frozen=True)
class Outcome:
    """Effects of reading an entry in a separate process.

    Attributes:
        error: Name of the exception; None if the entry was read.
        message: Message of the error.
        events: Suspicious events of the interpreter's audit hooks: imports, code, processes.
        growth_mib: How much the process's peak memory grew.
        processor_s: Processor seconds.
    """

    error: str | None
    message: str
    events: list[str]
    growth_mib: float
    processor_s: float


def make_entry(root: Path, *, compress: bool) -> Path:
    """Write an entry of `make_groups()`; return its folder."""
    EntryStore(str(root), compress=compress).write(KEY, make_groups(), fingerprint={"seed": 1}, generate_s=1.0)
    return root / KEY.name


def forge(entry: Path, change: Callable[[Forgery], object]) -> None:
    """Change an entry and update its checksums, unless the change returns True because it wrote the manifest itself."""
    forgery = Forgery(entry)
    if change(forgery) is not True:
        forgery.seal()


def read_in_child(roots: Mapping[str, Path], *, limit_mib: int) -> dict[str, Outcome]:
    """Read the entry of each folder in one process, whose memory may grow by `limit_mib`.

    A name is missing if the process died or took too long.
    """
    path = os.pathsep.join(part for part in sys.path if part)
    asked = json.dumps({name: str(root) for name, root in roots.items()})
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(READER), str(limit_mib)]
    child = subprocess.run(
        command, input=asked, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, env=environment, check=False
    )
    return {line.pop("name"): Outcome(**line) for line in map(json.loads, child.stdout.splitlines())}
