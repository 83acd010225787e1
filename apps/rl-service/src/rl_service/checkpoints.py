"""Saved weights by path, such as `tinker://RUN/weights/NAME`, as folders on disk."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from rl_core.errors import DataError
from rl_core.files import read_record, sync_folder, write_durably
from rl_rollout.gateway import RefusedError, refused_field

Segment = Literal["weights", "sampler_weights", "external_weights"]
RECORD = "saved.json"
_RUN = re.compile(r"[A-Za-z0-9-]+(:train:\d+)?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 24 * 3600


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Saved weights.

    Attributes:
        path: Where clients find them.
        base_model: Name under which their client asked for the base model.
        rank: Rank of the adapter; 0 if they are all weights.
        step: Optimizer steps that they have.
        saved_at: Unix time.
        size_bytes: Size of all files.
        user_metadata: The client's own.
        expires_at: Unix time after which they are removed; None if never.
        is_snapshot: Made for one sampling client, and removed after newer ones.
        train_mlp: Their client trains the layers' MLPs.
        train_attn: Their client trains the layers' attention.
    """

    path: str
    base_model: str
    rank: int
    step: int
    saved_at: float
    size_bytes: int = 0
    user_metadata: dict[str, str] | None = None
    expires_at: float | None = None
    is_snapshot: bool = False
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def run(self) -> str:
        """The training client that saved them."""
        return split_path(self.path)[0]

    @property
    def segment(self) -> Segment:
        """Whether they are to train, to sample or to download."""
        return split_path(self.path)[1]

    @property
    def has_expired(self) -> bool:
        """True if they can no longer be found, and will be removed."""
        return self.expires_at is not None and self.expires_at < time.time()


def weights_path(run: str, segment: Segment, name: str) -> str:
    """Return the path of weights with a name.

    Raises:
        RefusedError: The name cannot be that of a file.
    """
    if not _NAME.fullmatch(name):
        raise refused_field("path", name, "a name of at most 128 letters, digits, dots, dashes and underscores")
    return f"tinker://{run}/{segment}/{name}"


def split_path(path: str) -> tuple[str, Segment, str]:
    """Return run, segment and name of a path.

    Raises:
        RefusedError: It is not such a path.
    """
    run, segment, name = [*path.removeprefix("tinker://").split("/"), "", "", ""][:3]
    is_path = path == f"tinker://{run}/{segment}/{name}" and segment in get_args(Segment)
    if not is_path or not _RUN.fullmatch(run) or not _NAME.fullmatch(name):
        raise refused_field(
            "path", path, f"tinker://RUN/KIND/NAME with one of the kinds {', '.join(get_args(Segment))}"
        )
    return run, segment, name  # type: ignore[return-value]  # checked above


class Checkpoints:
    """All saved weights below a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the records of a folder. Of what a killed process left, complete weights stay and others are removed."""
        self._folder, self._lock = folder, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for hidden in sorted(folder.glob("*/*/.*"), reverse=True):  # new weights before those that they replace
            place = hidden.with_name(hidden.name.lstrip("."))
            if (hidden / RECORD).exists() and not place.exists():
                hidden.rename(place)
            else:
                shutil.rmtree(hidden)
        self._saved: dict[str, Saved] = {}
        for file in folder.glob(f"*/*/*/{RECORD}"):
            saved = read_record(file, Saved)
            if self._place(saved.path) != file.parent:
                raise DataError(f"{file} is the record of {saved.path}, which belongs elsewhere. Restore the folder.")
            self._saved[saved.path] = saved

    def __iter__(self) -> Iterator[Saved]:
        """Iterate over all weights that clients named and that have not expired, oldest first."""
        named = [one for one in list(self._saved.values()) if not one.is_snapshot and not one.has_expired]
        return iter(sorted(named, key=_age))

    def find(self, path: str) -> Saved:
        """Return the record of saved weights.

        Raises:
            RefusedError: There are none, or they have expired.
        """
        split_path(path)
        found = self._saved.get(path)
        if found is None or found.has_expired:
            raise RefusedError(f"there are no saved weights at {path}; they may have expired.", kind="not_found_error")
        return found

    def folder_of(self, path: str) -> Path:
        """Return the folder of saved weights, which exist; see `find`."""
        return self._place(self.find(path).path)

    def downloads(self, path: str) -> Mapping[str, Path]:
        """Return the files of weights to download, by name.

        Raises:
            RefusedError: There are none.
        """
        if self.find(path).segment != "external_weights":
            raise RefusedError(f"{path} cannot be downloaded; use one of save_weights_external.", param="path")
        return {file.name: file for file in self._place(path).glob("*/*") if file.is_file()}

    def set_expiry(self, path: str, expires_at: float | None) -> None:
        """Set the Unix time after which weights are removed.

        Raises:
            RefusedError: There are none.
        """
        saved = msgspec.structs.replace(self.find(path), expires_at=expires_at)
        write_durably(self._place(path) / RECORD, msgspec.json.encode(saved))
        self._saved[path] = saved

    def check_free(self, path: str, *, overwrite: bool) -> None:
        """Check that weights can be saved at a path.

        Raises:
            RefusedError: There are some already.
        """
        if not overwrite and (found := self._saved.get(path)) is not None and not found.has_expired:
            raise RefusedError(f"{path} exists already. Choose another name, or save with overwrite.", param="path")

    def save(self, saved: Saved, write: Callable[[Path], None]) -> Saved:
        """Write weights into a new folder, which replaces one at the same path; complete, or not at all.

        Args:
            saved: Their record, without the size.
            write: Writes the files into an empty folder.
        """
        place = self._place(saved.path)
        part = place.with_name(f".{place.name}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            write(part)
            size = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
            saved = msgspec.structs.replace(saved, size_bytes=size)
            write_durably(part / RECORD, msgspec.json.encode(saved))
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        with self._lock:
            replaced = _set_aside(place) if place.exists() else None
            part.rename(place)
            sync_folder(place.parent)
            self._saved[saved.path] = saved
            if replaced is not None:
                _discard(replaced)
        return saved

    def remove(self, path: str) -> None:
        """Remove saved weights.

        Raises:
            RefusedError: There are none.
        """
        self._drop(self.find(path))

    def newest(self, run: str) -> Saved | None:
        """Return the newest state that a training client saved."""
        return max((one for one in self if one.run == run and one.segment == "weights"), key=_age, default=None)

    def sweep(self, *, kept_snapshots: int) -> None:
        """Remove expired weights, and all but the newest snapshots of each training client."""
        by_run: dict[str, list[Saved]] = {}
        for saved in list(self._saved.values()):
            if saved.has_expired:
                self._drop(saved)
            elif saved.is_snapshot:
                by_run.setdefault(saved.run, []).append(saved)
        for snapshots in by_run.values():
            for saved in sorted(snapshots, key=_age)[:-kept_snapshots]:
                self._drop(saved)

    def _drop(self, saved: Saved) -> None:
        """Remove weights, unless they were removed or replaced meanwhile."""
        with self._lock:
            if self._saved.get(saved.path) == saved:
                del self._saved[saved.path]
                _discard(_set_aside(self._place(saved.path)))

    def _place(self, path: str) -> Path:
        run, segment, name = split_path(path)
        return self._folder / run.replace(":", "_") / segment / name


def _set_aside(place: Path) -> Path:
    """Hide a folder of weights, whose place another one may take, and return where it is now."""
    aside = place.with_name(f"..{place.name}")
    shutil.rmtree(aside, ignore_errors=True)
    place.rename(aside)
    return aside


def _discard(aside: Path) -> None:
    """Remove a hidden folder, first its record: half removed, it must not become weights again."""
    (aside / RECORD).unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)


def expiry(ttl_s: int | None) -> float | None:
    """Return the Unix time after a time to live.

    Raises:
        RefusedError: The time is too short or too long.
    """
    if ttl_s is None:
        return None
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise refused_field("ttl_seconds", ttl_s, f"from {MIN_TTL_S} to {MAX_TTL_S}, or none")
    return time.time() + ttl_s


def _age(saved: Saved) -> float:
    return saved.saved_at
