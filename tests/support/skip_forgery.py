"""Forged entries of a skip cache with valid checksums, and a child process that reads them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from entry_forgery import Forgery
from skip_groups import make_groups

from rl_core.files.array_entries import SUFFIX
from rl_rollout.skip import EntryKey, EntryStore
from rl_rollout.skip.rows import iter_arrays

KEY = EntryKey(step=1)
READER = Path(__file__).with_name("skip_reader.py")
DEADLINE_S = 240.0


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


def path_of(root: Path, key: EntryKey = KEY) -> Path:
    return root / f"{key.name}{SUFFIX}"


def make_entry(root: Path, *, compress: bool = True) -> Path:
    """Write an entry of `make_groups()`; return its file."""
    EntryStore(str(root), compress=compress).write(KEY, make_groups(), fingerprint={"seed": 1}, generate_s=1.0)
    return path_of(root)


@cache
def _entry_bytes(compress: bool) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return make_entry(Path(folder), compress=compress).read_bytes()


def copy_entry(root: Path, *, compress: bool = True) -> Path:
    """Copy an entry of `make_entry` to a folder; return its file."""
    root.mkdir(exist_ok=True)
    path_of(root).write_bytes(_entry_bytes(compress))
    return path_of(root)


def forge(entry: Path, change: Callable[[Forgery], object]) -> None:
    """Change an entry, with valid checksums, unless the change returns True because it wrote the file itself."""
    forgery = Forgery(entry)
    if change(forgery) is not True:
        forgery.save()


def records() -> Any:
    """Return the records of the groups that `make_entry` stores."""
    return json.loads(dict(iter_arrays(make_groups()))["records"].tobytes())


def put_records(forgery: Forgery, content: Any) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    forgery.put_array("records", np.frombuffer(raw, dtype=np.uint8))


def read_in_child(roots: Mapping[str, Path], *, limit_mib: int) -> dict[str, Outcome]:
    """Read the entry of each folder in one process, whose memory may grow by `limit_mib`.

    A name is missing if the process died or took too long.
    """
    path = os.pathsep.join(part for part in sys.path if part)
    asked = json.dumps({name: str(root) for name, root in roots.items()})
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(READER), str(limit_mib)]
    child = subprocess.run(
        command, input=asked, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, env=environment, check=False
    )
    return {line.pop("name"): Outcome(**line) for line in map(json.loads, child.stdout.splitlines())}
