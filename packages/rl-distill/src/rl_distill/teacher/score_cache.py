"""A cache of teachers' scores on disk, so that known trajectories are not scored again."""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import structlog

from rl_core.errors import BrokenEntryError, CacheError, MissingExtraError
from rl_core.files.array_entries import FORMAT, EntryFolder
from rl_core.record_fields import converts_arguments, record
from rl_distill.teacher.score_entries import MAX_ENTRY_BYTES, read_keys, read_scores, write_entry
from rl_distill.teacher.scores import NO_TOKEN, TeacherRow, TeacherScores

log = structlog.get_logger(__name__)

MAX_PENDING_BYTES = 1 << 23
"""Space for about 30 trajectories of 512 tokens with the top 64 tokens each."""


@record
class ScoreKind:
    """Properties that scores must share to be interchangeable.

    Attributes:
        teacher: Fingerprint of the teacher's weights; see `model_fingerprint`.
        dtype: Computation dtype.
        top_k: Number of most likely tokens in addition to the sampled one.
        temperature: Temperature of the distribution.
        with_hidden: Whether hidden states are stored.
    """

    teacher: str
    dtype: str
    top_k: int
    temperature: float = 1.0
    with_hidden: bool = False

    @property
    def digest(self) -> bytes:
        """32-byte digest of all properties."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


class ScoreCache:
    """Scores of one teacher in a folder; several threads and processes may share it.

    New scores stay in memory until they fill an entry; `flush` writes the rest.

    Attributes:
        folder: Folder of the entries.
        failure: The error after which scores are no longer stored; None if there was none.
    """

    @converts_arguments
    def __init__(self, directory: Path, kind: ScoreKind, *, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        """Open the folder; create it if missing.

        Args:
            directory: Folder of all teachers' scores, with a subfolder per kind.
            kind: Kind of the scores.
            max_pending_bytes: Size of new scores in memory at which an entry is written.

        Raises:
            CacheError: The folder cannot be created or read, or has entries of an earlier format.
            MissingExtraError: zarr is not installed.
        """
        self.folder = directory / kind.digest.hex()[:16]
        try:
            self._stored = EntryFolder(str(self.folder), max_entry_bytes=MAX_ENTRY_BYTES)
        except MissingExtraError as error:
            raise MissingExtraError(
                "a cache of teachers' scores needs zarr. Install the extra rl-distill[cache]; see the README."
            ) from error
        self._kind = kind
        self._max_pending_bytes = max_pending_bytes
        self._lock = threading.RLock()
        self._opened: set[str] = set()
        self._places: dict[str, str] = {}  # the entry of each key
        self._pending: dict[str, TeacherScores] = {}
        self._pending_bytes = 0
        self.failure: CacheError | None = None
        self._prepare()

    def __len__(self) -> int:
        """Return the number of trajectories with known scores."""
        with self._lock:
            return len(self._places.keys() | self._pending.keys())

    def lookup(self, rows: Sequence[TeacherRow]) -> list[TeacherScores | None]:
        """Return the cached scores of each trajectory; None for unknown ones.

        A damaged entry is moved aside with a warning, and its trajectories become unknown.

        Raises:
            CacheError: The folder cannot be read.
        """
        keys = [score_key(self._kind, row) for row in rows]
        with self._lock:
            if any(key not in self._places and key not in self._pending for key in keys):
                self._find_entries()
            found = self._read(dict(zip(keys, rows, strict=True)))
        return [found.get(key) for key in keys]

    def store(self, rows: Sequence[TeacherRow], scores: Sequence[TeacherScores]) -> None:
        """Store scores of trajectories. If the disk fails, log a warning and store nothing more.

        Args:
            rows: The trajectories.
            scores: Checked and masked scores of this cache's kind.

        Raises:
            CacheError: The scores are of another kind.
        """
        with self._lock:
            for row, found in zip(rows, scores, strict=True):
                key = score_key(self._kind, row)
                if self.failure is None and key not in self._places and key not in self._pending:
                    self._pending[key] = stored = self._packed(found, row)
                    self._pending_bytes += stored.size_bytes
                if self._pending_bytes >= self._max_pending_bytes:
                    self.flush()

    def flush(self) -> None:
        """Write the new scores that are in memory."""
        with self._lock:
            if not self._pending:
                return
            pending, self._pending, self._pending_bytes = self._pending, {}, 0
            try:
                name = write_entry(self._stored, pending, kind=asdict(self._kind))
            except CacheError as error:
                self.failure = error
                log.warning("teacher_scores_not_stored", trajectories=len(pending), error=str(error))
            else:
                self._open(name)

    # -- internal

    def _prepare(self) -> None:
        try:
            self._stored.prepare()
        except CacheError as error:
            raise CacheError(f"distillation.cache: {error}") from error
        if old := [name for name in self._stored.others() if name.startswith("scores-")]:
            raise CacheError(
                f"distillation.cache: {self.folder} has entries of format 1, such as {old[0]}; this version reads "
                f"format {FORMAT}. Use a new folder, or the commit that wrote them, 226990a0."
            )
        self._find_entries()

    def _find_entries(self) -> None:
        """Open entries that other processes have stored since."""
        for name in self._stored.names():
            if name not in self._opened:
                self._open(name)

    def _open(self, name: str) -> None:
        self._opened.add(name)
        try:
            self._places |= dict.fromkeys(read_keys(self._stored, name), name)
        except BrokenEntryError as error:
            self._drop(name, error)

    def _read(self, rows: Mapping[str, TeacherRow]) -> dict[str, TeacherScores | None]:
        """Return the known scores of trajectories by key, entry by entry; those of damaged entries are missing."""
        found = {key: _unpacked(self._pending[key], row) for key, row in rows.items() if key in self._pending}
        for name in dict.fromkeys(self._places[key] for key in rows if key in self._places):
            try:
                stored = read_scores(self._stored, name, width=self._kind.top_k + 1)
            except BrokenEntryError as error:
                self._drop(name, error)
            else:
                found |= {key: _unpacked(stored[key], row) for key, row in rows.items() if key in stored}
        return found

    def _drop(self, name: str, error: BrokenEntryError) -> None:
        """Forget a damaged or missing entry, and move it aside."""
        self._places = {key: entry for key, entry in self._places.items() if entry != name}
        path = self._stored.path_of(name)
        try:
            target = self._stored.set_aside(name)
        except CacheError as refusal:  # a read-only disk: leave it in place
            log.warning("teacher_scores_broken", entry=path, error=str(error), refusal=str(refusal))
        else:
            if target is not None:
                log.warning("teacher_scores_set_aside", entry=path, now=target, error=str(error))

    def _packed(self, scores: TeacherScores, row: TeacherRow) -> TeacherScores:
        """Return the scores at trained tokens."""
        width = self._kind.top_k + 1
        if scores.logprobs.shape != (len(row.input_ids), width) or (scores.hidden is None) is self._kind.with_hidden:
            raise CacheError(
                f"scores to store must have shape [{len(row.input_ids)}, "
                f"{width}]{' and hidden states' if self._kind.with_hidden else ' and no hidden states'}; found "
                f"{list(scores.logprobs.shape)}{'' if scores.hidden is None else ' and hidden states'}."
            )
        mask = row.loss_mask
        hidden = None if scores.hidden is None else scores.hidden[mask]
        return TeacherScores(logprobs=scores.logprobs[mask], token_ids=scores.token_ids[mask], hidden=hidden)


def score_key(kind: ScoreKind, row: TeacherRow) -> str:
    """Return the key of a trajectory's scores: a digest of its tokens, its loss mask and the scores' kind."""
    digest = hashlib.sha256(kind.digest)
    digest.update(len(row.input_ids).to_bytes(8, "little"))
    digest.update(row.input_ids.astype("<i4").tobytes())
    digest.update(np.packbits(row.loss_mask).tobytes())
    return digest.hexdigest()


def _unpacked(stored: TeacherScores, row: TeacherRow) -> TeacherScores | None:
    """Spread stored scores to their tokens; None if they do not match the trajectory despite their key."""
    mask = row.loss_mask
    own = row.input_ids[mask]
    if len(stored.logprobs) != len(own) or not np.array_equal(stored.token_ids[:, 0], own):
        return None
    size = (len(mask), stored.logprobs.shape[1])
    found = TeacherScores(
        logprobs=np.zeros(size, dtype=np.float32),
        token_ids=np.full(size, NO_TOKEN, dtype=np.int32),
        hidden=None if stored.hidden is None else np.zeros((len(mask), stored.hidden.shape[1]), dtype=np.float32),
    )
    found.logprobs[mask], found.token_ids[mask] = stored.logprobs, stored.token_ids
    if found.hidden is not None and stored.hidden is not None:
        found.hidden[mask] = stored.hidden
    return found
