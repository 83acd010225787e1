"""A run's folder: its lock, settings and summary, and the trainer's own state in its checkpoints."""

import datetime
import fcntl
import itertools
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from rl_core.errors import CheckpointError, DataError, MissingExtraError, SettingsError
from rl_core.files import open_lock_file, read_toml, write_durably
from rl_core.secret_settings import redact
from rl_distill.checkpoints import STATE_FILE, CheckpointStore, read_state
from rl_trainer_parts.settings.algorithm_choice import option_defaults
from rl_trainer_parts.settings.fields import ENTRY, changeable_on_resume, find_setting, leaves, plain_settings
from rl_trainer_parts.settings.schema import ReadableBy, Settings, SettingsT


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run at the end of a step, in both trainers.

    Attributes:
        step: Last finished step.
        policy_version: Version of the learner's weights.
        num_samples: Number of trajectories trained on.
        wall_s: Seconds so far, over all launches.
        steps_wall_s: Seconds spent in training steps.
        results: Validation results by name, such as "validation_accuracy_first".
        kl: State of the KL coefficient; empty before the first step.
    """

    step: int = 0
    policy_version: int = 0
    num_samples: int = 0
    wall_s: float = 0.0
    steps_wall_s: float = 0.0
    results: Mapping[str, float] = field(default_factory=dict)
    kl: Mapping[str, float] = field(default_factory=dict)


State = TypeVar("State", bound=RunState)


def read_run_state(folder: Path, kind: type[State]) -> State:
    """Read the state from a verified checkpoint.

    Raises:
        CheckpointError: The state is not readable.
    """
    try:
        return kind(**read_state(folder))
    except TypeError as error:
        raise CheckpointError(f"{folder / STATE_FILE} is not readable: {error}.") from None


FORMAT = 4
"""Number of the format of a run's folder: of its settings, checkpoints and records. Folders without it have 1."""

READERS = {1: "version 0.1 (commit c72489a1)", 2: "commit 226990a0", 3: "commit 135fed37"}
"""What reads each older format."""

OF_RUNS = ("format", "events.jsonl", "checkpoints")
"""What tells a run's folder from one that `new` has written; folders of format 1 lack the first."""


WITHHELD: Mapping[ReadableBy, int] = {"owner": 0o077, "group": 0o027, "everyone": 0o022}
"""The umask for each setting."""


class RunFolder:
    """A run's folder, locked by one process at a time."""

    def __init__(self, path: Path, *, readable_by: ReadableBy = "owner", setting: str | None = None) -> None:
        """Set the path, and who may read the files that this process writes; nothing is created yet.

        Args:
            path: The folder.
            readable_by: Who may read the files.
            setting: Name of the setting with the path, for errors; None is that of a trainer.
        """
        self.path = path
        self._other_folder = f"another folder with --{setting or 'run.directory'}=FOLDER"
        self._other = self._other_folder if setting else "another name with --run.name=NAME"
        self._umask = WITHHELD[readable_by]
        self._umask_before: int | None = None
        self._lock: int | None = None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def has_run(self) -> bool:
        """True if a run was started in the folder."""
        return (self.path / "settings.toml").exists()

    def acquire(self) -> None:
        """Create and lock the folder; the kernel releases the lock when this process ends.

        Until `release`, this process and its children use the run's umask.

        Raises:
            SettingsError: The folder cannot be created, others can read or write it, or another process holds it.
        """
        try:
            with suppress(FileExistsError):
                self.path.parent.mkdir(parents=True)
            self._umask_before = os.umask(self._umask)
            _make_folder(self.path, self._umask)
            lock = open_lock_file(self.path / ".lock")
        except (OSError, SettingsError) as error:
            self.release()
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(
                f"run folder {self.path} cannot be created ({error}). Choose {self._other_folder}."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(lock, 100).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            self.release()
            raise SettingsError(
                f"run folder {self.path} is in use by a live run (process {holder}). Wait for it, stop it, or choose "
                f"{self._other}."
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock

    def release(self) -> None:
        """Release the lock and restore the umask. Can be called twice."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # at once, even if a starting child has a copy
            os.close(self._lock)
            self._lock = None
        if self._umask_before is not None:
            os.umask(self._umask_before)
            self._umask_before = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder while the context is open; see `acquire`."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def archive(self) -> Path:
        """Rename the existing run's folder, lock a new one, and return the old run's path."""
        name = f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}"
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        aside = next(path for path in map(self.path.with_name, names) if not path.exists())
        self.path.rename(aside)
        self.release()
        self.acquire()
        return aside

    def write_settings(self, settings: Settings) -> None:
        """Write the effective settings, with defaults and without literal secrets, and the number of their format."""
        write_durably(self.path / "format", f"{FORMAT}\n".encode())
        write_durably(self.path / "settings.toml", tomli_w.dumps(plain_settings(settings, has_none=False)).encode())

    def check_resume(self, settings: Settings) -> None:
        """Refuse to resume with settings that would change what the run learns.

        For secrets, such as headers, only names are compared, because a key may have been renewed.

        Raises:
            SettingsError: Lists the differences, and says which settings may differ.
        """
        file = self.path / "settings.toml"
        try:
            before = _flat(redact(read_toml(file), keep_references=False), type(settings))
        except (DataError, AttributeError) as error:
            raise SettingsError(f"{file}, written when the run started, is not readable: {error}.") from None
        before = option_defaults(type(settings)) | before
        plain = redact(plain_settings(settings, has_none=False), keep_references=False)
        now = _flat(plain, type(settings))
        changeable = changeable_on_resume(type(settings))
        differing = [
            f"  {name}: the run has {before.get(name, 'none')!r}, now {now.get(name, 'none')!r}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name) and _general_name(name) not in changeable
        ]
        if differing:
            lines = "\n".join(differing)
            raise SettingsError(
                f"run {self.path} cannot be resumed with other settings:\n{lines}\nRestore them, or start a new run "
                "with --run.name=NAME. `train --help` marks the settings that may differ on resume."
            )

    def drop_if_nothing_was_saved(self) -> Path | None:
        """Forget a run that failed before its first checkpoint, so that the next launch starts from the beginning.

        Returns:
            Where its files were moved, so that a later run does not mistake them for its own; None if there were none.
        """
        if any(self.checkpoints.glob("step_*")):
            return None
        if all(path.name in (".lock", ".supervisor", "format", "settings.toml") for path in self.path.iterdir()):
            (self.path / "settings.toml").unlink(missing_ok=True)
            return None
        return self.archive()

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Write `summary.json`."""
        file = self.path / "summary.json"
        write_durably(file, (json.dumps(summary, indent=2) + "\n").encode())
        return file


def _make_folder(path: Path, umask: int) -> None:
    """Create a folder whose mode follows a umask, or change an existing one's mode.

    Raises:
        SettingsError: The folder belongs to another user, who could read and change its files, or keeps another mode.
        OSError: The folder cannot be created.
    """
    path.mkdir(exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() and os.geteuid() != 0:
        raise SettingsError(
            f"run folder {path} must belong to user {os.geteuid()}; found user {found.st_uid}, who could read and "
            "change the run. Choose another folder with --run.directory=FOLDER or another name with --run.name=NAME."
        )
    mode = stat.S_IMODE(found.st_mode)
    wanted = (mode & ~0o777) | (0o777 & ~umask)
    if mode == wanted:
        return
    path.chmod(wanted)
    left = stat.S_IMODE(path.stat().st_mode) & umask
    if left:
        raise SettingsError(
            f"run folder {path} must not have the mode bits {umask:03o}; its file system keeps {left:03o}. "
            "Choose another folder with --run.directory=FOLDER, or accept it with --run.readable_by=everyone."
        )


def require_format(path: Path) -> None:
    """Refuse a run's folder of another format; anything else is no run's folder, and is not judged here.

    Args:
        path: A run's folder, or a checkpoint in one.

    Raises:
        SettingsError: Names the format, and what reads it.
    """
    path = path.absolute()
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    if not (run / "settings.toml").is_file() or not any((run / name).exists() for name in OF_RUNS):
        return
    file = run / "format"
    try:
        text = file.read_text("utf-8", "replace").strip()[:20] or "unknown"
    except FileNotFoundError:
        text = "1"
    except OSError as error:
        raise SettingsError(f"{file} is not readable: {error}.") from error
    if text != str(FORMAT):
        reader = READERS.get(int(text) if text.isdecimal() else 0, "the version that wrote it")
        raise SettingsError(f"{run} is a run in format {text}, and this version reads format {FORMAT}. Use {reader}.")


def require_run(folder: RunFolder) -> None:
    """Refuse to resume a run that was never started.

    Raises:
        SettingsError: There is no run.
    """
    if not folder.has_run:
        raise SettingsError(f"--resume: {folder.path} has no run to resume. Leave out --resume to start one.")


def require_free(folder: RunFolder) -> None:
    """Refuse to start where a run exists.

    Raises:
        SettingsError: There is a run.
    """
    if folder.has_run:
        raise SettingsError(
            f"{folder.path} already holds a run. Resume it (--resume), archive it (--run.if_exists=archive), "
            "or choose another name (--run.name=NAME)."
        )


def require_resumable(folder: RunFolder, settings: Settings) -> None:
    """Refuse a run that cannot continue with these settings; nothing is written.

    Raises:
        SettingsError: There is no run, it was started with other settings, or it is beyond the last step.
    """
    require_run(folder)
    require_format(folder.path)
    folder.check_resume(settings)
    done = max(CheckpointStore(folder.checkpoints, keep=1).steps(), default=0)
    if done > settings.trainer.steps:
        raise SettingsError(
            f"--resume: {folder.path} has finished {done} steps, more than "
            f"trainer.steps = {settings.trainer.steps}. Raise it."
        )


def choose_date(settings: SettingsT, *, resume: bool) -> SettingsT:
    """Resolve `prompts.date = none`: the resumed run's date, else today."""
    if settings.prompts.date is not None:
        return settings
    before = settings_at_start(settings, resume=resume)
    date = datetime.date.today().isoformat() if before is None else before.get("prompts", {}).get("date")
    return settings.model_copy(update={"prompts": replace(settings.prompts, date=date)})


def choose_products(settings: SettingsT, *, resume: bool) -> SettingsT:
    """Resolve `optimizer.products = "auto"`: the resumed run's choice, else what is faster on this machine.

    Raises:
        SettingsError: The run was started with products that this machine cannot compute.
    """
    if settings.optimizer.products != "auto":
        return settings
    before = settings_at_start(settings, resume=resume)
    products = "auto" if before is None else before.get("optimizer", {}).get("products", "torch")
    from rl_distill.learners import chosen_products  # imports torch, which other commands do not need

    optimizer = replace(settings.optimizer, products=chosen_products(products))
    return settings.model_copy(update={"optimizer": optimizer})


def settings_at_start(settings: Settings, *, resume: bool) -> dict[str, Any] | None:
    """The settings with which the run started that is resumed; None if a new one starts."""
    file = settings.run_folder / "settings.toml"
    if not (resume or settings.run.if_exists == "resume") or not file.exists():
        return None
    try:
        return read_toml(file)
    except DataError:  # check_resume reports it
        return None


@contextmanager
def open_run(settings: Settings, *, resume: bool, say: Callable[[str], None]) -> Iterator[RunFolder]:
    """Lock the run's folder, with the run to resume or an empty place for a new one.

    Args:
        settings: `run.if_exists` decides about an existing run.
        resume: Resume it, whatever `run.if_exists` says.
        say: Reports what happens to an earlier run.

    Raises:
        SettingsError: The folder is in use, holds a run, or was started with other settings.
    """
    folder = RunFolder(settings.run_folder, readable_by=settings.run.readable_by)
    if resume:
        require_run(folder)
    folder.acquire()
    try:
        if folder.has_run and (resume or settings.run.if_exists == "resume"):
            require_resumable(folder, settings)
        elif folder.has_run and settings.run.if_exists == "archive":
            say(f"the earlier run was moved to {folder.archive()}")
        else:
            require_free(folder)
        folder.write_settings(settings)
        try:
            yield folder
        except (SettingsError, DataError, MissingExtraError):
            aside = folder.drop_if_nothing_was_saved()
            if aside is not None:
                say(f"no step was saved; the run's files were moved to {aside}")
            raise
    finally:
        folder.release()


def _flat(values: Mapping[str, Any], kind: type[Settings]) -> dict[str, Any]:
    """Values by full name, including entries of tables."""
    flat: dict[str, Any] = {}
    for section, fields in values.items():
        for name, value in fields.items():
            setting = find_setting(f"{section}.{name}", kind)
            if setting is not None and setting.entry_kind is not None:
                flat |= leaves(value, f"{section}.{name}.")
            else:
                flat[f"{section}.{name}"] = value
    return flat


def _general_name(name: str) -> str:
    """A setting's name without the names of table entries."""
    section, key, *rest = name.split(".", 3)
    return f"{section}.{key}.{ENTRY}.{rest[1]}" if len(rest) == 2 else name
