"""A run's checkpoints: written in the background, verified by a manifest, and published by a rename."""

import json
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from rl_core.data import Json
from rl_core.errors import CheckpointError, DeadlineError
from rl_core.files import checksum, read_json_object, read_record, sync_file, sync_folder, write_durably
from rl_core.record_fields import PositiveInt, converts_arguments
from rl_distill.background import PendingSave, in_daemon_thread

log = structlog.get_logger(__name__)

MANIFEST = "manifest.json"
STATE_FILE = "trainer.json"
MANIFEST_FORMAT = 1
CHUNK_BYTES = 1 << 24

_STEP_FOLDER = re.compile(r"step_(0|[1-9][0-9]{0,17})")


class _OtherFormatError(CheckpointError):
    """The checkpoint was written in another release's format; it may be intact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        step: The trainer's step.
        folder: Folder of the checkpoint.
        took_s: Seconds since the call of `CheckpointStore.begin`.
    """

    step: int
    folder: Path
    took_s: float


class CheckpointStore:
    """The checkpoints of one run. Use it from one process and one thread at a time."""

    @converts_arguments
    def __init__(self, directory: Path, *, keep: PositiveInt, on_saved: Callable[[Saved], None] | None = None) -> None:
        """Configure the store; nothing is written yet.

        Args:
            directory: Parent of the `step_N` folders; created by the first save.
            keep: Number of newest checkpoints to keep.
            on_saved: Called with each complete checkpoint, in the thread that wrote it.

        Raises:
            SettingsError: keep < 1.
        """
        self._directory = directory
        self._keep = keep
        self._on_saved = on_saved
        self._saving: tuple[int, Future[None]] | None = None

    def begin(
        self,
        step: int,
        state: Mapping[str, Json],
        write: Callable[[Path], PendingSave],
        *,
        also_keep: Collection[int] = (),
    ) -> None:
        """Begin a checkpoint. A crash at any point leaves either the old or the new one complete.

        The checkpoint is written, verified and renamed in the background, one at a time: this call first waits for the
        previous one.

        Args:
            step: Step that names the checkpoint; an existing checkpoint of this step is replaced.
            state: The trainer's state; serialized during this call.
            write: Copies the learners' state and starts to write it into the given folder, e.g. `lambda folder:
                learner.save(folder, in_background=True)`; see also `saved_together`.
            also_keep: Steps whose checkpoints are kept beside the newest ones when older ones are removed.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        self.wait()
        started = time.perf_counter()
        content = json.dumps(dict(state), indent=2).encode()
        with self._told_as_errors():
            if not self._directory.is_dir():
                self._directory.mkdir(parents=True)
                sync_folder(self._directory.parent)
            self._sweep()
            aside = self._directory / f".step_{step}.part"
            aside.mkdir()
        pending = write(aside)

        def finish() -> None:
            pending.wait()
            (aside / STATE_FILE).write_bytes(content)
            self._publish(step, aside, also_keep=frozenset(also_keep))
            if self._on_saved is not None:
                took_s = time.perf_counter() - started
                self._on_saved(Saved(step=step, folder=self._folder(step), took_s=took_s))

        self._saving = step, in_daemon_thread(finish, name=f"checkpoint-{step}")

    def wait(self, deadline_s: float | None = None) -> None:
        """Wait for the pending checkpoint, if there is one.

        Args:
            deadline_s: Maximum wait in seconds; None waits indefinitely.

        Raises:
            CheckpointError: The checkpoint could not be written; raised once.
            DeadlineError: The time ran out; writing continues.
        """
        if self._saving is None:
            return
        step, saving = self._saving
        if not wait([saving], deadline_s).done:
            raise DeadlineError(f"the checkpoint of step {step} is still being written after {deadline_s:g} s.")
        self._saving = None
        error = saving.exception()
        if error is not None:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written into {self._directory}: {type(error).__name__}: "
                f"{error}"
            ) from error

    def close(self) -> None:
        """Wait for the pending checkpoint; a failure to write it is logged. Can be called twice."""
        try:
            self.wait()
        except CheckpointError as error:
            log.error("checkpoint_not_written", error=str(error))

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        try:
            names = [path.name for path in self._directory.iterdir()] if self._directory.is_dir() else []
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot be read: {error.strerror}.") from error
        return sorted(int(found[1]) for name in names if (found := _STEP_FOLDER.fullmatch(name)))

    def newest(self, on_broken: Callable[[CheckpointError], None]) -> Path | None:
        """Return the newest intact checkpoint; None if there is none.

        Args:
            on_broken: Called with the error of each broken checkpoint that is skipped. The broken one is renamed to
                `broken_step_N`, so that later calls do not find it.

        Raises:
            CheckpointError: The newest checkpoint was written by another release; it is left unchanged.
        """
        self.wait()
        with self._told_as_errors():
            self._sweep()
        for step in reversed(self.steps()):
            folder = self._folder(step)
            try:
                verify_checkpoint(folder)
            except _OtherFormatError:
                raise
            except CheckpointError as error:
                aside = self._directory / f"broken_step_{step}"
                with self._told_as_errors():
                    shutil.rmtree(aside, ignore_errors=True)
                    folder.rename(aside)
                on_broken(error)
            else:
                return folder
        return None

    def _folder(self, step: int) -> Path:
        return self._directory / f"step_{step}"

    def _publish(self, step: int, aside: Path, *, also_keep: frozenset[int]) -> None:
        """Flush the files, write the manifest, rename the folder, and remove old checkpoints."""
        entries = sorted(aside.rglob("*"))
        files = {str(file.relative_to(aside)): _record(file) for file in entries if file.is_file()}
        for folder in reversed([entry for entry in entries if entry.is_dir()]):
            sync_folder(folder)
        write_durably(aside / MANIFEST, json.dumps({"format": MANIFEST_FORMAT, "files": files}, indent=2).encode())
        final = self._folder(step)
        if final.exists():
            final.rename(self._directory / f".step_{step}.old")
        aside.rename(final)
        sync_folder(self._directory)
        for old in [one for one in self.steps()[: -self._keep] if one not in also_keep]:
            self._folder(old).rename(self._directory / f".step_{old}.gone")
        self._sweep()

    def _sweep(self) -> None:
        """Clean up after a crash: remove incomplete checkpoints, and restore one that was being replaced."""
        for pattern in (".step_*.part", ".step_*.gone"):
            for part in self._directory.glob(pattern):
                shutil.rmtree(part)
        for old in self._directory.glob(".step_*.old"):
            final = self._directory / old.name.removeprefix(".").removesuffix(".old")
            if final.exists():
                shutil.rmtree(old)
            else:
                old.rename(final)

    @contextmanager
    def _told_as_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot manage the checkpoints in {self._directory}: {error}. Make the folder writable."
            ) from error


@converts_arguments
def verify_checkpoint(folder: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: A file is missing or differs in size or checksum, or the manifest was written by
            another release.
    """
    for name, recorded in _read_manifest(folder).items():
        file = folder / name
        try:
            found = file.stat().st_size
            is_whole = found != recorded.size_bytes or file_crc32c(file) == recorded.crc32c
        except (FileNotFoundError, ValueError):  # it is missing, or the name impossible
            raise CheckpointError(f"checkpoint {folder} lacks {name}, which its manifest lists.") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
        if found != recorded.size_bytes:
            raise CheckpointError(f"{file} is torn: expected {recorded.size_bytes} bytes, found {found}.")
        if not is_whole:
            raise CheckpointError(f"{file} is damaged: its checksum differs from the one in the manifest.")


@converts_arguments
def read_state(folder: Path) -> dict[str, Any]:
    """Read the trainer's state of a verified checkpoint.

    Raises:
        CheckpointError: The state cannot be read.
    """
    return read_json_object(folder / STATE_FILE, error=CheckpointError)


class _FileRecord(msgspec.Struct):
    size_bytes: int
    crc32c: int


class _Manifest(msgspec.Struct):
    format: int
    files: dict[str, _FileRecord]


def _read_manifest(folder: Path) -> dict[str, _FileRecord]:
    """Return the size and checksum of each file in the manifest."""
    manifest = read_record(folder / MANIFEST, _Manifest, error=CheckpointError)
    if manifest.format != MANIFEST_FORMAT:
        raise _OtherFormatError(
            f"checkpoint {folder} has a manifest of format {manifest.format}; this release reads {MANIFEST_FORMAT}. "
            "Use the release that wrote it."
        )
    if STATE_FILE not in manifest.files:
        raise CheckpointError(f"checkpoint {folder} has no {STATE_FILE} in its {MANIFEST}.")
    return manifest.files


def file_crc32c(file: Path) -> int:
    """Return the CRC-32C of a file."""
    total = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            total = checksum(chunk, total)
    return total


def _record(file: Path) -> dict[str, int]:
    sync_file(file)
    return {"size_bytes": file.stat().st_size, "crc32c": file_crc32c(file)}
