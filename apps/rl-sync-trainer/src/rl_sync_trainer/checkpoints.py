"""Checkpoints: written aside, checked by a manifest, renamed into place."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rl_core.checksums import checksum
from rl_core.errors import CheckpointError

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer.json"
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the loop itself must remember, at the end of a step.

    Attributes:
        step: Last finished step.
        policy_version: Version that the engines served.
        prompt_source: State of the prompt source.
        num_samples: Trajectories trained on.
        wall_s: Seconds spent so far, over all attempts.
        steps_wall_s: Seconds of the training steps alone.
        results: Validation results by name, such as "validation_accuracy_first".
        kl: State of the KL's coefficient; empty before the first step.
        unlogged: Metrics of `step` while it is not validated and logged; none when it is.
    """

    step: int = 0
    policy_version: int = 0
    prompt_source: Mapping[str, Any] = field(default_factory=dict)
    num_samples: int = 0
    wall_s: float = 0.0
    steps_wall_s: float = 0.0
    results: Mapping[str, float] = field(default_factory=dict)
    kl: Mapping[str, float] = field(default_factory=dict)
    unlogged: Mapping[str, float] | None = None


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """Name the folder, and how many of the newest checkpoints to keep."""
        self._directory = directory
        self._keep = keep

    def save(self, state: TrainerState, write_learner: Callable[[Path], None]) -> Path:
        """Write one checkpoint; after a crash at any point the old or the new one is whole.

        Args:
            state: The loop's own state; its step names the checkpoint.
            write_learner: Writes the learner's files into the folder that it is given.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        final = self._directory / f"step_{state.step}"
        aside = self._directory / f".step_{state.step}.part"
        aside.mkdir()
        write_learner(aside)
        (aside / TRAINER_STATE).write_text(json.dumps(asdict(state), indent=2))
        files = {str(file.relative_to(aside)): _record(file) for file in sorted(aside.rglob("*")) if file.is_file()}
        write_durably(aside / MANIFEST, json.dumps({"format": 1, "files": files}, indent=2).encode())
        if final.exists():
            final.rename(self._directory / f".step_{state.step}.old")
        aside.rename(final)
        sync_folder(self._directory)
        self._sweep()
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self._directory / f"step_{old}")
        return final

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        names = [path.name for path in self._directory.glob("step_*")] if self._directory.is_dir() else []
        return sorted(int(name.removeprefix("step_")) for name in names if name.removeprefix("step_").isdigit())

    def newest(self, on_broken: Callable[[CheckpointError], None]) -> Path | None:
        """The newest whole checkpoint, or None where there is none.

        Args:
            on_broken: Told about each broken one that is passed over; it is renamed to `broken_step_N`, so that it
                never counts among the newest again.
        """
        self._sweep()
        for step in reversed(self.steps()):
            folder = self._directory / f"step_{step}"
            try:
                verify_checkpoint(folder)
            except CheckpointError as error:
                aside = self._directory / f"broken_step_{step}"
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                on_broken(error)
            else:
                return folder
        return None

    def _sweep(self) -> None:
        """Clear up what a crash left: half a checkpoint goes, one that was being replaced comes back."""
        for part in self._directory.glob(".step_*.part"):
            shutil.rmtree(part)
        for old in self._directory.glob(".step_*.old"):
            final = self._directory / old.name.removeprefix(".").removesuffix(".old")
            if final.exists():
                shutil.rmtree(old)
            else:
                old.rename(final)


def verify_checkpoint(folder: Path) -> None:
    """Check every file against the manifest.

    Raises:
        CheckpointError: A file is missing, has another size, or another checksum.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, int]] = manifest["files"]
        names = {name: (int(record["size_bytes"]), int(record["crc32c"])) for name, record in files.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable {MANIFEST}: {error}.") from None
    for name, (size_bytes, crc32c) in names.items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
            raise CheckpointError(f"checkpoint {folder} lacks {name}, which its manifest lists.")
        found = file.stat().st_size
        if found != size_bytes:
            raise CheckpointError(f"{file} is torn: {size_bytes} bytes were written, {found} are there.")
        if file_crc32c(file) != crc32c:
            raise CheckpointError(f"{file} is damaged: its checksum is not the one in the manifest.")


def read_trainer_state(folder: Path) -> TrainerState:
    """The loop's state of a verified checkpoint.

    Raises:
        CheckpointError: It is not readable.
    """
    try:
        return TrainerState(**json.loads((folder / TRAINER_STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / TRAINER_STATE} is not readable: {error}.") from None


def write_durably(file: Path, content: bytes) -> None:
    """Write a file aside, flush it to the disk, and rename it into place."""
    part = file.with_name(f".{file.name}.part")
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot; the rename is then as durable as they make it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_crc32c(file: Path) -> int:
    """crc32c of a file's bytes."""
    total = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            total = checksum(chunk, total)
    return total


def _record(file: Path) -> dict[str, int]:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
    return {"size_bytes": file.stat().st_size, "crc32c": file_crc32c(file)}
