"""Sessions, training clients and sampling clients, in a journal that survives the server."""

import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog

from rl_core.errors import DataError
from rl_core.files import write_durably
from rl_rollout.gateway import RefusedError

log = structlog.get_logger(__name__)


class Session(msgspec.Struct, kw_only=True, tag=True):
    """A program's session.

    Attributes:
        session_id: Its id.
        user_metadata: The client's own.
        display_name: The client's name for it.
        opened_at: Unix time.
    """

    session_id: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    opened_at: float


class Training(msgspec.Struct, kw_only=True, tag=True):
    """A training client.

    Attributes:
        model_id: Its id.
        session_id: Its session.
        base_model: Name under which it asked for the base model.
        rank: Rank of its adapter; 0 if it trains all weights.
        user_metadata: The client's own.
        opened_at: Unix time.
    """

    model_id: str
    session_id: str
    base_model: str
    rank: int
    user_metadata: dict[str, Any] | None = None
    opened_at: float


class Sampling(msgspec.Struct, kw_only=True, tag=True):
    """A sampling client.

    Attributes:
        sampler_id: Its id.
        session_id: Its session.
        base_model: Name of the base model.
        path: Saved weights that it samples from; None samples from the base model.
        follows: Training client whose newest in-flight weights it samples from instead.
    """

    sampler_id: str
    session_id: str
    base_model: str
    path: str | None = None
    follows: str | None = None


class Progress(msgspec.Struct, kw_only=True, tag=True):
    """Optimizer steps of a training client."""

    model_id: str
    step: int


class Ended(msgspec.Struct, kw_only=True, tag=True):
    """The end of a session or training client, and why."""

    name: str
    why: str


Entry = Session | Training | Sampling | Progress | Ended


@dataclass(slots=True, eq=False)
class TrainingClient:
    """A training client of this launch or of an earlier one.

    Attributes:
        entry: Its entry in the journal.
        step: Its optimizer steps.
        broken: Why its gradients are incomplete; None if they are not.
        lost: Why its weights are no longer in memory; None if they are.
        seen_at: Unix time of its last request.
    """

    entry: Training
    step: int = 0
    broken: str | None = None
    lost: str | None = None
    seen_at: float = field(default_factory=time.time)

    @property
    def model_id(self) -> str:
        """Its id."""
        return self.entry.model_id


class Clients:
    """All sessions and their clients."""

    def __init__(self, folder: Path) -> None:
        """Read the journal in a folder, if there is one, and continue it without what has ended.

        Training clients of the journal are lost, because their weights were in memory.

        Raises:
            DataError: The journal is damaged.
        """
        self.sessions: dict[str, Session] = {}
        self.training: dict[str, TrainingClient] = {}
        self.sampling: dict[str, Sampling] = {}
        self.ended: dict[str, str] = {}
        self.seen: dict[str, float] = {}
        self._lock = threading.Lock()
        file = folder / "clients.jsonl"
        self._restore(file)
        self._journal = file.open("ab")

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    @property
    def num_open(self) -> int:
        """Number of sessions that have not ended."""
        return sum(session_id not in self.ended for session_id in self.sessions)

    def open_session(self, *, user_metadata: dict[str, Any] | None, display_name: str | None) -> Session:
        """Open a session."""
        session = Session(
            session_id=secrets.token_hex(12),
            user_metadata=user_metadata,
            display_name=display_name,
            opened_at=time.time(),
        )
        self._note(session)
        return session

    def live_session(self, session_id: str) -> Session:
        """Return a session that has not ended, which shows a sign of life.

        Raises:
            RefusedError: There is none.
        """
        session = self.sessions.get(session_id)
        if session is None or session_id in self.ended:
            why = self.ended.get(session_id, "it is not known here")
            raise RefusedError(f"session {session_id[:80]} is not open: {why}.", kind="not_found_error")
        self.seen[session_id] = time.monotonic()
        return session

    def open_training(
        self, session_id: str, model_seq_id: int, *, base_model: str, rank: int, user_metadata: dict[str, Any] | None
    ) -> TrainingClient:
        """Add a training client of a session."""
        entry = Training(
            model_id=training_id(session_id, model_seq_id),
            session_id=session_id,
            base_model=base_model,
            rank=rank,
            user_metadata=user_metadata,
            opened_at=time.time(),
        )
        self._note(entry)
        return self.training[entry.model_id]

    def open_sampling(self, entry: Sampling) -> Sampling:
        """Add a sampling client, unless it exists."""
        if entry.sampler_id not in self.sampling:
            self._note(entry)
        return self.sampling[entry.sampler_id]

    def trains(self, model_id: str) -> TrainingClient:
        """Return a training client.

        Raises:
            RefusedError: There is none of this id.
        """
        client = self.training.get(model_id)
        if client is None:
            raise RefusedError(f"there is no training client {model_id[:120]!r}.", kind="not_found_error")
        client.seen_at = time.time()
        self.seen[client.entry.session_id] = time.monotonic()
        return client

    def sampler(self, sampler_id: str) -> Sampling:
        """Return a sampling client.

        Raises:
            RefusedError: There is none of this id.
        """
        if sampler_id not in self.sampling:
            raise RefusedError(f"there is no sampling client {sampler_id[:120]!r}.", kind="not_found_error")
        return self.sampling[sampler_id]

    def stepped(self, client: TrainingClient, step: int) -> None:
        """Note how many optimizer steps a training client has."""
        client.step = step
        self._note(Progress(model_id=client.model_id, step=step))

    def end(self, name: str, why: str) -> None:
        """Note the end of a session or training client; the first reason stays."""
        if name not in self.ended:
            self._note(Ended(name=name, why=why))

    def of_session(self, session_id: str) -> Iterator[TrainingClient]:
        """Iterate over the training clients of a session whose weights are in memory."""
        for client in list(self.training.values()):
            if client.entry.session_id == session_id and client.lost is None:
                yield client

    def lose_all(self, why: str) -> None:
        """Note that the weights of all training clients are no longer in memory."""
        for client in self.training.values():
            client.lost = client.lost or f"{why} after its step {client.step}"

    def _note(self, entry: Entry) -> None:
        """Write an entry. On a full disk, steps and ends still count, but a restarted server does not know them."""
        try:
            with self._lock:
                self._journal.write(msgspec.json.encode(entry) + b"\n")
                self._journal.flush()
                if not isinstance(entry, Progress):
                    os.fsync(self._journal.fileno())
        except OSError as error:
            if not isinstance(entry, Progress | Ended):
                raise
            log.warning("journal_not_written", error=str(error))
        self._apply(entry)

    def _restore(self, file: Path) -> None:
        if not file.exists():
            return
        content = file.read_bytes()
        complete = content.rpartition(b"\n")[0]
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                self._apply(msgspec.json.decode(line, type=Entry))
            except (msgspec.MsgspecError, KeyError) as error:
                raise DataError(f"{file}, line {number} is damaged: {error}. Restore it, or move the folder.") from None
        self.sessions = {name: one for name, one in self.sessions.items() if name not in self.ended}
        self.sampling = {name: one for name, one in self.sampling.items() if one.session_id not in self.ended}
        trained = [one.entry for one in self.training.values()]
        steps = [Progress(model_id=one.model_id, step=one.step) for one in self.training.values()]
        ended = [Ended(name=name, why=why) for name, why in self.ended.items()]
        entries: list[Entry] = [*self.sessions.values(), *trained, *steps, *self.sampling.values(), *ended]
        write_durably(file, b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
        self.lose_all("the server was restarted")

    def _apply(self, entry: Entry) -> None:
        match entry:
            case Session():
                self.sessions[entry.session_id] = entry
                self.seen[entry.session_id] = time.monotonic()
            case Training():
                self.training[entry.model_id] = TrainingClient(entry)
            case Sampling():
                self.sampling[entry.sampler_id] = entry
            case Progress():
                self.training[entry.model_id].step = entry.step
            case Ended():
                self.ended[entry.name] = entry.why
                if entry.name in self.training:
                    self.training[entry.name].lost = entry.why


def training_id(session_id: str, model_seq_id: int) -> str:
    """Return the id of a session's training client, which clients also compute."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_id(session_id: str, sampling_session_seq_id: int) -> str:
    """Return the id of a session's sampling client."""
    return f"{session_id}:sample:{sampling_session_seq_id}"
