"""A run's checkpoints: written aside while training goes on, checked by a manifest, renamed into place."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from rl_core.data import Json
from rl_core.errors import CheckpointError, DeadlineError, SettingsError
from rl_core.files import shown, sync_file, sync_folder, write_durably
from rl_core.record_fields import converts_arguments
from rl_distill.checkpoints.pending_save import PendingSave
from rl_distill.checkpoints.plain_files import file_crc32c, read_json_object
from rl_distill.daemon_thread import in_daemon_thread

log = structlog.get_logger(__name__)

MANIFEST = "manifest.json"
STATE_FILE = "trainer.json"
MANIFEST_FORMAT = 1

_STEP_FOLDER = re.compile(r"step_(0|[1-9][0-9]{0,17})")


class _OtherFormatError(CheckpointError):
    """A checkpoint of another release: whole, for all that is known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is complete.

    Attributes:
        step: Of the trainer.
        folder: Where it is.
        took_s: From `CheckpointStore.begin` on.
    """

    step: int
    folder: Path
    took_s: float


class CheckpointStore:
    """The checkpoints of one run. One caller at a time; one process at a time."""

    @converts_arguments
    def __init__(self, directory: Path, *, keep: int, on_saved: Callable[[Saved], None] | None = None) -> None:
        """Name the folder; nothing is written yet.

        Args:
            directory: Of `step_N` folders; made by the first save.
            keep: How many of the newest checkpoints to keep.
            on_saved: Told about each checkpoint when it is complete, in a thread of its own.

        Raises:
            SettingsError: keep < 1.
        """
        if keep < 1:
            raise SettingsError(f"a store must keep >= 1 checkpoints; found {keep}.")
        self._directory = directory
        self._keep = keep
        self._on_saved = on_saved
        self._saving: tuple[int, Future[None]] | None = None

    def begin(self, step: int, state: Mapping[str, Json], write: Callable[[Path], PendingSave]) -> None:
        """Begin a checkpoint; after a crash at any point the old or the new one is complete.

        It is written, checked and renamed in the background, one at a time: this waits for the one before.

        Args:
            step: Names the checkpoint; one of the same step is replaced.
            state: The trainer's own; as it is now.
            write: Copies what learners hold, and begins to write it into the folder that it is given, such as
                `lambda folder: learner.save(folder, in_background=True)`; see also `saved_together`.

        Raises:
            CheckpointError: The one before could not be written.
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
            self._publish(step, aside)
            if self._on_saved is not None:
                took_s = time.perf_counter() - started
                self._on_saved(Saved(step=step, folder=self._folder(step), took_s=took_s))

        self._saving = step, in_daemon_thread(finish, name=f"checkpoint-{step}")

    def wait(self, deadline_s: float | None = None) -> None:
        """Wait until what was begun is complete; returns at once where nothing is.

        Args:
            deadline_s: Longest wait; None waits for ever.

        Raises:
            CheckpointError: It could not be written; said once.
            DeadlineError: The time ran out; it is still being written.
        """
        if self._saving is None:
            return
        step, saving = self._saving
        if not wait([saving], deadline_s).done:
            raise DeadlineError(
                f"waited {deadline_s:g} s for the checkpoint of step {step}, which is still being written."
            )
        self._saving = None
        error = saving.exception()
        if error is not None:
            raise CheckpointError(
                f"the checkpoint of step {step} was not written into {self._directory}: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """Wait for what was begun; that it could not be written is logged. Can be called twice."""
        try:
            self.wait()
        except CheckpointError as error:
            log.error("checkpoint_not_written", error=str(error))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        try:
            names = [path.name for path in self._directory.iterdir()] if self._directory.is_dir() else []
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot be read: {error.strerror}.") from error
        return sorted(int(found[1]) for name in names if (found := _STEP_FOLDER.fullmatch(name)))

    def newest(self, on_broken: Callable[[CheckpointError], None]) -> Path | None:
        """The newest whole checkpoint, or None where there is none.

        Args:
            on_broken: Told about each broken one that is passed over; it is renamed to `broken_step_N`, so that it
                never counts among the newest again.

        Raises:
            CheckpointError: The newest is of another release; it stays as it is.
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
                    _remove(aside)
                    folder.rename(aside)
                on_broken(error)
            else:
                return folder
        return None

    def _folder(self, step: int) -> Path:
        return self._directory / f"step_{step}"

    def _publish(self, step: int, aside: Path) -> None:
        """Flush what was written, list it, give it its name, and let older ones go."""
        entries = sorted(aside.rglob("*"))
        files = {str(file.relative_to(aside)): _record(file) for file in entries if file.is_file()}
        for folder in reversed([entry for entry in entries if entry.is_dir()]):
            sync_folder(folder)
        write_durably(aside / MANIFEST, json.dumps({"format": MANIFEST_FORMAT, "files": files}, indent=2).encode())
        final = self._folder(step)
        if os.path.lexists(final):
            final.rename(self._directory / f".step_{step}.old")
        aside.rename(final)
        sync_folder(self._directory)
        for old in self.steps()[: -self._keep]:
            self._folder(old).rename(self._directory / f".step_{old}.gone")
        self._sweep()

    def _sweep(self) -> None:
        """Clear up what a crash left: half a checkpoint goes, one that was being replaced comes back."""
        for pattern in (".step_*.part", ".step_*.gone"):
            for part in self._directory.glob(pattern):
                _remove(part)
        for old in self._directory.glob(".step_*.old"):
            final = self._directory / old.name.removeprefix(".").removesuffix(".old")
            if os.path.lexists(final) or old.is_symlink() or not old.is_dir():
                _remove(old)
            else:
                old.rename(final)

    @contextmanager
    def _told_as_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {self._directory} cannot be put in order: {error}. Make it a folder that can be "
                "written."
            ) from error


def _remove(path: Path) -> None:
    """Remove a folder, or what is in its place; a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@converts_arguments
def verify_checkpoint(folder: Path) -> None:
    """Check every file against the manifest.

    Raises:
        CheckpointError: A file is missing, is a link, has another size or another checksum, or another release
            wrote the manifest.
    """
    for name, (size_bytes, crc32c) in _read_manifest(folder).items():
        file = folder / name
        if not _is_plain(file, folder):
            raise CheckpointError(f"checkpoint {folder} lacks {name}, which its manifest lists.")
        found = file.stat().st_size
        if found != size_bytes:
            raise CheckpointError(f"{file} is torn: {size_bytes} bytes were written, {found} are there.")
        if file_crc32c(file) != crc32c:
            raise CheckpointError(f"{file} is damaged: its checksum is not the one in the manifest.")


@converts_arguments
def read_state(folder: Path) -> dict[str, Any]:
    """The trainer's state of a verified checkpoint.

    Raises:
        CheckpointError: It is not readable.
    """
    try:
        return read_json_object(folder / STATE_FILE)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / STATE_FILE} is not readable: {error}") from None


def _read_manifest(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of each file."""
    try:
        manifest = read_json_object(folder / MANIFEST)
        found, records = manifest["format"], manifest["files"].items()
        files = {name: (_number(record["size_bytes"]), _number(record["crc32c"])) for name, record in records}
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable {MANIFEST}: {error}.") from None
    if found != MANIFEST_FORMAT:
        raise _OtherFormatError(
            f"checkpoint {folder} has a manifest of format {shown(found)}; this release reads {MANIFEST_FORMAT}. Use "
            "the release that wrote it."
        )
    if STATE_FILE not in files:
        raise CheckpointError(f"checkpoint {folder} has no {STATE_FILE} in its {MANIFEST}.")
    return files


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("sizes and checksums must be whole numbers from 0")
    return value


def _is_plain(file: Path, folder: Path) -> bool:
    """True for a file that lies in a folder, and is reached by no link."""
    try:
        return (
            ".." not in file.parts and file.resolve() == folder.resolve() / file.relative_to(folder) and file.is_file()
        )
    except (OSError, ValueError, RuntimeError):  # a name that cannot be, or links in a circle
        return False


def _record(file: Path) -> dict[str, int]:
    sync_file(file)
    return {"size_bytes": file.stat().st_size, "crc32c": file_crc32c(file)}
