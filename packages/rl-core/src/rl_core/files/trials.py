"""Trial reads of strangers' files in a child process, so that a crash or an endless loop does not end this process."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_core.data.records import Json
from rl_core.errors import DataError, RLError
from rl_core.files.locked_folders import cache_folder
from rl_core.files.plain_files import open_plain, preview
from rl_core.record_fields import converts_arguments

MEMORY_BYTES = 1 << 31
BASE_CPU_S = 4
BYTES_PER_CPU_S = 1 << 22
"""Minimum reading speed; users' tokenizers and Parquet files are read five times as fast."""

DEADLINE_S = 60
CHUNK_BYTES = 1 << 24
CACHE = "rl-core/tried"
CHILD = Path(__file__).with_name("trial_child.py")
ARROW_TRIAL = Path(__file__).with_name("arrow_trial.py")
ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


@converts_arguments
def run_trial(
    script: Path,
    request: Mapping[str, Json],
    *,
    files: Sequence[Path],
    libraries: Sequence[str],
    extra_cpu_s: int = 0,
    error: type[RLError] = DataError,
    what: str = "",
) -> None:
    """Read files with a script in a child of limited memory and CPU time, unless the same files passed before.

    A digest in the user's cache folder records files that passed.

    Args:
        script: File whose `main(**request)` reads the files. An exception is the problem; the last line that it prints
            says what it was doing when a limit ended it.
        request: Arguments of `main`.
        files: Files to read; error messages name the first.
        libraries: Distributions that read the files; other versions repeat the trial.
        extra_cpu_s: CPU seconds beyond the base allowance and the allowance for the files' size.
        error: Exception class to raise if the files cannot be used.
        what: Name in error messages if it is not a file.
    """
    folder = cache_folder(CACHE)
    passed = folder and folder / _digest(script, request, files, libraries, error=error)
    if passed and passed.exists():
        return
    cpu_s = BASE_CPU_S + extra_cpu_s + sum(file.stat().st_size for file in files) // BYTES_PER_CPU_S
    problem = _problem(script, request, cpu_s=cpu_s)
    if problem is not None:
        raise error(f"{what or files[0]} cannot be used: {problem}.")
    if passed:
        with contextlib.suppress(OSError):  # the next call repeats the trial
            passed.touch()


@converts_arguments
def try_arrow_files(files: Sequence[Path], *, error: type[RLError] = DataError) -> None:
    """Check that Parquet and Arrow files decode, and that their contents fit into memory.

    Raises:
        error: A file is invalid or too large, for example a hundred million rows or a cell of a gigabyte.
    """
    run_trial(ARROW_TRIAL, {"files": list(map(str, files))}, files=files, libraries=["pyarrow"], error=error)


def _problem(script: Path, request: Mapping[str, Json], *, cpu_s: int) -> str | None:
    limits = [[resource.RLIMIT_CPU, cpu_s], [resource.RLIMIT_DATA, MEMORY_BYTES], [resource.RLIMIT_CORE, 0]]
    deadline_s = DEADLINE_S + 4 * cpu_s
    try:
        done = subprocess.run(  # noqa: S603 - our own scripts
            [sys.executable, "-u", "-P", str(CHILD), str(script)],
            input=json.dumps({"limits": limits, "request": dict(request)}).encode(),
            capture_output=True,
            timeout=deadline_s,
            env=os.environ | ENVIRONMENT,
        )
    except subprocess.TimeoutExpired:
        return f"reading it took longer than {deadline_s} s"
    doing, problem = (out.decode(errors="replace").strip().rpartition("\n")[2] for out in (done.stdout, done.stderr))
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"{doing or 'reading it'} took longer than {cpu_s} s of CPU time"
    if done.returncode < 0:
        return f"{doing or 'reading it'} crashed the trial process with {signal.Signals(-done.returncode).name}"
    return preview(problem.rstrip("."), most=400)[1:-1] if done.returncode else None


def _digest(
    script: Path, request: Mapping[str, Json], files: Sequence[Path], libraries: Sequence[str], *, error: type[RLError]
) -> str:
    digest = hashlib.blake2b(script.read_bytes(), digest_size=20)
    used = [f"{name} {importlib.metadata.version(name)}" for name in libraries]
    # Paths do not affect the result.
    others = {name: value for name, value in request.items() if name not in ("files", "folder")}
    digest.update(json.dumps([used, others, [file.name for file in files]], sort_keys=True).encode())
    for file in files:
        with open_plain(file, error=error) as (stream, size):
            digest.update(size.to_bytes(8, "little"))
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
