"""How benchmarks/skip_cache.py talks to the process of a system: lines of JSON, one answer to each request.

    -> (started)                                <- "ready", once the samples are made in the system's own form
    -> {"operation": "write"}                   <- {"wall_s": s, "size_bytes": n}
    -> {"operation": "read"}                    <- {"wall_s": s}, what was written last, compared afterwards
    -> {"operation": "write_unflushed"}         <- {"wall_s": s}, where a system flushes to the disk
    -> {"operation": "versions"}                <- {package: version}
    -> {"operation": "quit"}, or end of input   <- (ends with status 0)

A request that fails is answered {"error": "..."}, and the process ends with status 1.
"""

import argparse
import itertools
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
from _protocol import private_stdout, versions, write
from _skip_samples import COLUMNS, Rows, make_samples
from numpy.typing import NDArray

PACKAGES = ("rl-rollout", "zarr", "numcodecs", "torch", "verl", "tensordict", "numpy")


class ChangedError(RuntimeError):
    """The values read differ from those written."""


class System(Protocol):
    """A system to measure; it has the samples in its own form, ready to be stored."""

    def write(self, place: Path) -> None:
        """Store the samples in a new file or folder."""

    def read(self, place: Path) -> Any:
        """Read all samples into memory, ready for use."""

    def columns(self, found: Any) -> Mapping[str, NDArray[Any]]:
        """Return the samples read as flat columns without padding; not timed."""


def serve(opened: Callable[[Rows], System]) -> int:
    """Open the system, answer requests until there are no more, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--groups", type=int, required=True)
    options = parser.parse_args()
    answers = private_stdout()
    try:
        samples = make_samples(options.groups)
        turns = Turns(opened(samples), samples, options.folder)
        write(answers, "ready")
        for line in sys.stdin:
            request = json.loads(line)
            if request["operation"] == "quit":
                break
            write(answers, json.dumps(turns.answer(request["operation"])))
    except Exception as error:
        traceback.print_exc()
        write(answers, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


class Turns:
    """A system's turns: each write makes a place of its own, from which the next read takes."""

    def __init__(self, system: System, samples: Rows, folder: Path) -> None:
        """Set the system, and the folder for its files."""
        self._system = system
        self._samples = samples
        self._places = (folder / f"{os.getpid()}-{number}" for number in itertools.count())
        self._place = next(self._places)

    def answer(self, operation: str) -> dict[str, Any]:
        """Run an operation and return its duration."""
        match operation:
            case "write":
                return self._write()
            case "write_unflushed":
                with patch("os.fsync", lambda _descriptor: None):
                    return self._write()
            case "read":
                return self._read()
            case "versions":
                return versions(PACKAGES)
        raise ValueError(f"operation must be one of this module's list; found {operation!r}.")

    def _write(self) -> dict[str, Any]:
        remove(self._place)
        self._place = next(self._places)
        os.sync()  # write back other systems' data outside this system's time
        started = time.perf_counter()
        self._system.write(self._place)
        return {"wall_s": time.perf_counter() - started, "size_bytes": size_bytes(self._place)}

    def _read(self) -> dict[str, Any]:
        started = time.perf_counter()
        found = self._system.read(self._place)
        wall_s = time.perf_counter() - started
        check(self._system.columns(found), self._samples)
        return {"wall_s": wall_s}


def check(found: Mapping[str, NDArray[Any]], samples: Rows) -> None:
    """Raise an error unless all values are equal.

    Raises:
        ChangedError: A column differs.
    """
    for name in COLUMNS:
        if not np.array_equal(found[name], samples.columns[name]):
            raise ChangedError(f"{name} must be read as it was written; {len(found[name])} values were read, changed.")


def size_bytes(place: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def remove(place: Path) -> None:
    """Remove a file or folder, if it exists."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
