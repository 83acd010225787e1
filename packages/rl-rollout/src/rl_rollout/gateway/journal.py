"""Stores sessions on disk, one file each. A turn is appended before its client receives the answer.

A file is `MAGIC` followed by frames, each with a length, a crc32c and a msgpack record. Its suffix is the state of the
session.
"""

import fcntl
import os
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import structlog

from rl_core.data import ImageSpan, IntArray
from rl_core.errors import DataError, SettingsError
from rl_core.files import checksum, open_lock_file, open_plain
from rl_rollout.engines.protocol import Generation, SamplingParams
from rl_rollout.gateway.messages import ChatMessage, MessageRole
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.sessions import Session, SessionLimits
from rl_rollout.gateway.tree import Sample, Turn

log = structlog.get_logger(__name__)

MAGIC = b"rl-rollout session 2\n"
FRAME = struct.Struct("<II")
SESSION_ID = re.compile(r"session-[0-9a-f]{16}")
OPEN, FINISHED, QUEUED = ".open", ".finished", ".queued"
"""Suffixes of session files. A queued session is finished and has been put into a queue."""


class _Opening(msgspec.Struct, tag="opening", forbid_unknown_fields=True):
    """First record of a file. The fields of all records have the names of the attributes that they store."""

    session_id: str
    key_digest: bytes
    prompt_uid: str
    session_index: int
    limits: SessionLimits
    metadata: dict[str, Any]


class _State(msgspec.Struct, tag="state", forbid_unknown_fields=True):
    counts: dict[str, int]
    faults: dict[bytes, str]
    reward: float | None
    reward_components: dict[str, float]
    failure: str | None
    is_finished: bool
    passed_s: float = 0.0  # set after the conversion of a session


class _Said(msgspec.Struct, tag="said", forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    message: ChatMessage
    generation: Generation
    asked_digest: bytes
    request_index: int
    generate_s: float
    never_trains: bool
    after: int | None  # number of the sample before the turn
    digests: list[bytes]
    new_ids: IntArray
    new_images: tuple[ImageSpan, ...] = ()
    asked_by: MessageRole
    kept_ids: IntArray | None  # None if all tokens are kept
    key: bytes  # of the turn
    state: _State


class _Delivered(msgspec.Struct, tag="delivered", forbid_unknown_fields=True):
    samples: list[int]


def _array_as_plain(array: Any) -> Any:
    return (array.dtype.str, array.shape, array.tobytes())


def _plain_as_array(_kind: Any, plain: Any) -> Any:
    dtype, shape, content = plain
    return np.frombuffer(content, dtype).reshape(shape)


_OF_SAMPLE = ("message", "generation", "asked_digest", "request_index", "generate_s", "never_trains")
_encode = msgspec.msgpack.Encoder(enc_hook=_array_as_plain).encode
_decode = msgspec.msgpack.Decoder(_Opening | _State | _Said | _Delivered, dec_hook=_plain_as_array).decode


class SessionFile:
    """File of an open session."""

    def __init__(self, session: Session, file: Path, *, size: int) -> None:
        """Continue an existing file.

        Args:
            session: The session.
            file: Path of the file.
            size: Number of bytes in complete records; the next write truncates the file to this size.
        """
        self._session, self._file, self._size = session, file, size
        self._numbers = {sample: number for number, sample in enumerate(session.tree.samples)}
        self._is_closed = False

    def said(self, sample: Sample, digests: Sequence[bytes]) -> None:
        """Record a sample.

        Args:
            sample: The sample, not yet added to the tree.
            digests: Digests of the new prefixes of its conversation; the last is that of the entire conversation.

        Raises:
            RefusedError: The record cannot be written.
        """
        turn, kept = sample.turn, sample.kept_ids
        said = _Said(
            **{name: getattr(sample, name) for name in _OF_SAMPLE},
            after=None if turn.after is None else self._numbers[turn.after],
            digests=list(digests),
            new_ids=turn.new_ids,
            new_images=turn.new_images,
            asked_by=turn.asked_by,
            kept_ids=None if kept is sample.generation.token_ids else kept,
            key=turn.key,
            state=_state(self._session),
        )
        self.append(said)
        self._numbers[sample] = len(self._numbers)

    def delivered(self, samples: Sequence[Sample]) -> None:
        """Record that the client received the samples; mark the session as failed if that is not possible."""
        with suppress(RefusedError):
            self.append(_Delivered([self._numbers[sample] for sample in samples]))

    def state(self, *, is_finished: bool) -> None:
        """Record the session's state except its turns. A finished state is the last record.

        Raises:
            RefusedError: The record cannot be written.
        """
        state = _state(self._session)
        state.is_finished = is_finished
        self.append(state)
        if is_finished:
            self._is_closed = True
            with suppress(OSError):  # the next start renames it
                self._file.rename(self._file.with_suffix(FINISHED))

    def append(self, record: msgspec.Struct) -> None:
        """Append a record.

        Raises:
            RefusedError: The session has ended, or the record cannot be written and the session has failed.
        """
        if self._is_closed:
            raise RefusedError("the session has ended.", kind="permission_error", code="session_limit")
        try:
            payload = _encode(record)
            self._size = _write(self._file, FRAME.pack(len(payload), checksum(payload)) + payload, at=self._size)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
            self._session.failure = self._session.failure or f"the gateway cannot store the session: {error}"
            raise RefusedError(self._session.failure, kind="api_error") from error


class Journal:
    """A folder of sessions, locked by one gateway at a time."""

    def __init__(self, folder: Path) -> None:
        """Create the folder if necessary, and lock it.

        Raises:
            SettingsError: Another gateway uses the folder, or it is not writable.
        """
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.fdopen(open_lock_file(folder / "lock"), "wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise SettingsError(f"another gateway stores its sessions in {folder}. Choose another folder.") from None
        except OSError as error:
            raise SettingsError(f"sessions cannot be stored in {folder}: {error}.") from error

    def close(self) -> None:
        """Unlock the folder. Safe to call twice."""
        self._lock.close()

    def begin(self, session: Session) -> None:
        """Create the file of a new session.

        Raises:
            RefusedError: The file cannot be written.
        """
        file = self.folder / f"{session.session_id}{OPEN}"
        try:
            file.touch(mode=0o600, exist_ok=False)
            session.log = SessionFile(session, file, size=_write(file, MAGIC, at=0))
            session.log.append(msgspec.convert(session, _Opening, from_attributes=True))
        except (OSError, RefusedError) as error:
            with suppress(OSError):
                file.unlink()  # otherwise every start would report a file without a session
            if isinstance(error, RefusedError):
                raise
            raise RefusedError(f"the gateway cannot store the session: {error}", kind="api_error") from error

    def restore(self, sampling: Callable[[int], SamplingParams]) -> Iterator[Session]:
        """Yield the sessions that were open when the last gateway ended; invalid files are logged."""
        for file in session_files(self.folder, OPEN):
            try:
                session, size = read_session(file, sampling)
            except DataError as error:
                log.error("gateway_session_refused", error=str(error))
                continue
            session.log = SessionFile(session, file, size=size)
            if session.is_finished:
                file.rename(file.with_suffix(FINISHED))
            else:
                yield session

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield the group and index of every stored session, in any state."""
        for file in session_files(self.folder, OPEN, FINISHED, QUEUED):
            opening = None
            with suppress(DataError, ValueError, msgspec.MsgspecError), open_plain(file) as opened:
                stream, size = opened
                stream.seek(len(MAGIC))
                opening, _ = next(_records(stream, size), (None, 0))
            if isinstance(opening, _Opening) and opening.session_id == file.stem:
                yield opening.prompt_uid, opening.session_index

    def find_finished(self, session_id: str) -> Session | None:
        """Read a finished session from its file; return None if there is none."""
        files = (self.folder / f"{session_id}{end}" for end in (FINISHED, QUEUED) if SESSION_ID.fullmatch(session_id))
        return next((read_session(file)[0] for file in files if file.exists()), None)


def session_files(folder: Path, *ends: str) -> list[Path]:
    """Return the session files in a folder with one of these suffixes, sorted by session id."""
    found = {file.stem: file for end in ends for file in folder.glob(f"*{end}") if SESSION_ID.fullmatch(file.stem)}
    return [found[name] for name in sorted(found)]  # a dict by id, since a file may be renamed during the search


def read_session(file: Path, sampling: Callable[[int], SamplingParams] | None = None) -> tuple[Session, int]:
    """Read a session, and return it with the number of bytes in complete records. A truncated last record is ignored.

    Args:
        file: The session's file.
        sampling: Returns the sampling parameters of a turn by its number; needed only to continue the session.

    Raises:
        DataError: The file is damaged, or not a session file.
    """
    with open_plain(file) as (stream, size):
        try:
            if stream.read(len(MAGIC)) != MAGIC:
                raise ValueError("it has no header of a session file")
            records = _records(stream, size)
            opening, place = next(records, (None, 0))
            if not isinstance(opening, _Opening) or opening.session_id != file.stem:
                raise ValueError("its first record must be the opening of the session that the file is named after")
            drawn = sampling or (lambda _turn: SamplingParams(max_tokens=1))
            session, size = Session(**msgspec.structs.asdict(opening), key="", sampling=drawn), place
            for record, size in records:  # noqa: B007 - the last one is the result
                _take(session, record)
        except Exception as error:  # libraries raise many types for a damaged file
            raise DataError(f"{file} is not a readable session: {error}. Move it elsewhere.") from error
    return session, size


def _records(stream: BinaryIO, size: int) -> Iterator[tuple[Any, int]]:
    """Yield each record and the byte position of its end, up to the last complete record."""
    place = len(MAGIC)
    while place + FRAME.size <= size:
        length, crc = FRAME.unpack(stream.read(FRAME.size))
        if place + FRAME.size + length > size:
            return
        payload = stream.read(length)
        if checksum(payload) != crc:
            raise ValueError(f"the record at byte {place} does not match its checksum")
        place += FRAME.size + length
        yield _decode(payload), place


def _take(session: Session, record: Any) -> None:
    """Apply a record to the session."""
    if isinstance(record, _Opening):
        raise TypeError("it has a second opening")
    if isinstance(record, _Delivered):
        for number in record.samples:
            session.tree.samples[number].is_delivered = True
        return
    if isinstance(record, _Said):
        session.tree.add(_sample(session, record), record.digests)
        record = record.state
    fields = msgspec.structs.asdict(record)
    session.opened_at = time.monotonic() - fields.pop("passed_s")
    for name, value in fields.items():
        setattr(session, name, value)
    session.counts = Counter(record.counts)


def _sample(session: Session, said: _Said) -> Sample:
    after = None if said.after is None else session.tree.samples[said.after]
    turn = Turn(after=after, new_ids=said.new_ids, new_images=said.new_images, asked_by=said.asked_by, key=said.key)
    turn = session.tree.open_turn(turn, said.digests)
    kept = said.generation.token_ids if said.kept_ids is None else said.kept_ids
    fields = {name: getattr(said, name) for name in _OF_SAMPLE}
    return Sample(turn=turn, kept_ids=kept, is_delivered=False, **fields)


def _state(session: Session) -> _State:
    state = msgspec.convert(session, _State, from_attributes=True)
    state.passed_s = session.limits.wall_s - session.seconds_left
    return state


def _write(file: Path, content: bytes, *, at: int) -> int:
    """Write content at the end of a file's complete records; return the new size."""
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != at:
            os.ftruncate(descriptor, at)
        while content:
            written = os.pwrite(descriptor, content, at)
            at, content = at + written, content[written:]
        return at
    finally:
        os.close(descriptor)
