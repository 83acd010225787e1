"""Sessions of the gateway, each with its own key, limits, and tree of sampled tokens."""

import asyncio
import hmac
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING

from rl_core.data import Json, Trajectory
from rl_core.errors import DataError, RLError, SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.tree import SessionTree
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rewards.outputs import shown_error

if TYPE_CHECKING:
    from rl_rollout.gateway.asks import Answer
    from rl_rollout.gateway.journal import SessionLog

KEY_BYTES = 32
MAX_METADATA_CHARS = 16_384
MAX_KEPT_ANSWERS = 16
MAX_KEPT_OVERHEADS = 64


@settings_record
class SessionLimits:
    """How far a session goes; beyond a limit its requests are refused, and what it has stays.

    Attributes:
        max_turns: Requests that are answered.
        max_tokens: Tokens that are sampled.
        max_concurrent: Requests under way at once.
        wall_s: Seconds from its opening.
    """

    max_turns: int = 256
    max_tokens: int = 1 << 20
    max_concurrent: int = 16
    wall_s: float = 3600.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            SettingsError: A limit is not positive.
        """
        for name in ("max_turns", "max_tokens", "max_concurrent", "wall_s"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} of a session must be above 0; found {getattr(self, name)}.")


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One run of an agent.

    Attributes:
        session_id: Names it to its owner.
        key: What the agent shows; never logged. Empty where the session was opened by a gateway that has died.
        key_digest: SHA-256 of it.
        prompt_uid: Its group.
        session_index: Which session of the group.
        limits: How far it goes.
        sampling: How a turn is drawn, by its number.
        metadata: The owner's.
        tree: What was prompted and sampled.
        counts: What happened: turns, forks, roots by reason, and the rest.
        overheads_ms: Milliseconds of its last turns beside the engine's.
        answers: Of the last requests that had an idempotency key.
        faults: Requests that the engine failed and that no retry made good, with its reasons.
        reward: The owner's.
        reward_components: Named parts of it.
        failure: Why the session cannot train.
        is_finished: Its requests are refused.
        opened_at: By the monotonic clock.
        running: Names of the requests under way, as the engine knows them.
        num_attended: Requests of clients that have not got all of their response.
        log: Keeps what happens on disk; None where nothing does.
    """

    session_id: str
    key: str = field(repr=False)
    key_digest: bytes = field(repr=False)
    prompt_uid: str
    session_index: int
    limits: SessionLimits
    sampling: Callable[[int], SamplingParams]
    metadata: Mapping[str, Json] = field(default_factory=dict)
    tree: SessionTree = field(default_factory=SessionTree)
    counts: Counter[str] = field(default_factory=Counter)
    overheads_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_OVERHEADS))
    answers: "dict[str, asyncio.Future[Answer]]" = field(default_factory=dict)
    faults: dict[bytes, str] = field(default_factory=dict)
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    is_finished: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    running: set[str] = field(default_factory=set)
    num_attended: int = 0
    log: "SessionLog | None" = None

    @property
    def seconds_left(self) -> float:
        """Of its wall time; below 0 when it has lasted longer."""
        return self.opened_at + self.limits.wall_s - time.monotonic()

    @asynccontextmanager
    async def attend(self) -> AsyncIterator[None]:
        """Count a client's request, from its head to the end of its response; it ends with the session's time.

        Raises:
            RefusedError: The session has ended, or has as many requests as it may have at once.
        """
        self._check_is_open()
        if self.num_attended >= self.limits.max_concurrent:
            raise RefusedError(
                f"the session has {self.num_attended} requests under way, its limit. Wait for one.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
        self.num_attended += 1
        try:
            async with asyncio.timeout(self.seconds_left) as deadline:
                yield
        except TimeoutError:
            if deadline.expired():
                raise self._over(f"has lasted its {self.limits.wall_s:g} s") from None
            raise
        finally:
            self.num_attended -= 1

    @contextmanager
    def admit(self) -> Iterator[tuple[int, str]]:
        """Let a request run; gives the number of its turn, which counts once nothing refuses it, and its name.

        Raises:
            RefusedError: The session has ended, or a limit is reached.
        """
        self._check_is_open()
        if self.counts["turns"] >= self.limits.max_turns:
            raise self._over(f"has had its {self.limits.max_turns} turns")
        if self.counts["sampled_tokens"] >= self.limits.max_tokens:
            raise self._over(f"has had its {self.limits.max_tokens} tokens")
        if self.failure is not None:
            raise RefusedError(f"the session has failed: {self.failure}", kind="api_error")
        number = self.counts["turns"]
        name = f"{self.session_id}/{number}"
        self.running.add(name)
        try:
            yield number, name
        except Exception as error:
            if not isinstance(error, RLError):  # a fault of ours, which no agent answers for
                self.note_fault(name.encode(), f"the gateway failed: {shown_error(error)}")
            raise
        finally:
            self.running.discard(name)

    def keep_answer(self, key: str, answer: "asyncio.Future[Answer]") -> None:
        """Remember the answer to a request, for when it comes again."""
        self.answers[key] = answer
        while len(self.answers) > MAX_KEPT_ANSWERS:
            self.answers.pop(next(iter(self.answers)))

    def note_fault(self, digest: bytes, reason: str) -> None:
        """Remember a request that the engine failed; what the end of the session aborts is no fault."""
        if not self.is_finished:
            self.faults[digest] = reason

    def set_reward(self, reward: float, components: Mapping[str, float] | None = None) -> None:
        """Take the owner's reward; the last one counts.

        Raises:
            DataError: It is no finite number, or the components are no mapping.
        """
        if not isinstance(components or {}, Mapping):
            raise DataError(f"components of session {self.session_id} must be an object; found {components!r:.80}.")
        for name, value in {"reward": reward, **(components or {})}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise DataError(f"{name} of session {self.session_id} must be a finite number; found {value!r}.")
        self.reward, self.reward_components = float(reward), dict(components or {})
        self.keep()

    def keep(self, *, is_finished: bool = False) -> None:
        """Have what the session has beside its turns kept on disk.

        Raises:
            RefusedError: It cannot be.
        """
        if self.log is not None:
            self.log.state(is_finished=is_finished)

    def result(self) -> SessionResult:
        """The session's trajectories with its reward, audited; a session that failed has none that train.

        What the engine could not serve, and no retry made good, fails the session: it is never a reward of 0. The last
        trajectory has the session's counts as the extra "gateway".
        """
        rows = self._told(self.tree.trajectories(self.prompt_uid, self.session_index))
        failure = self.failure or next(iter(self.faults.values()), None)
        if failure is None and not rows:
            failure = "the agent asked for nothing that trains"
            if self.counts["other_sampling"]:
                failure += ': its client decided on the sampling; serve with --decided-by run (decided_by = "run")'
        try:
            self.tree.audit(rows)
        except DataError as error:
            failure = f"the audit refuses the session: {error}"
        if failure is not None:
            return SessionResult(trajectories=rows, failure=failure)
        components = self.reward_components
        scored = (replace(row, reward=self.reward, reward_components=components) for row in rows)
        return SessionResult(trajectories=tuple(scored))

    def _told(self, rows: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """Trajectories, the last of them with what happened in the session."""
        if not rows:
            return ()
        overheads = [round(each, 2) for each in self.overheads_ms]
        counts = {**self.counts, "untrained_tokens": self.tree.num_untrained_tokens, "overhead_ms": overheads}
        *others, last = rows
        return (*others, replace(last, extras={**last.extras, "session": self.session_id, "gateway": counts}))

    def _check_is_open(self) -> None:
        if self.is_finished:
            raise self._over("has ended")
        if self.seconds_left <= 0:
            raise self._over(f"has lasted its {self.limits.wall_s:g} s")

    @staticmethod
    def _over(reason: str) -> RefusedError:
        return RefusedError(f"the session {reason}.", kind="permission_error", code="session_limit")


class Sessions:
    """All sessions that are open, by key and by id."""

    def __init__(self, *, max_sessions: int = 4096, begin: Callable[[Session], None] | None = None) -> None:
        """Open none yet; `begin` gets each before it is served."""
        self._max_sessions, self._begin = max_sessions, begin
        self._by_key: dict[bytes, Session] = {}
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def open(
        self,
        *,
        prompt_uid: str,
        session_index: int,
        sampling: Callable[[int], SamplingParams],
        limits: SessionLimits | None = None,
        metadata: Mapping[str, Json] | None = None,
    ) -> Session:
        """A new session, with a key of 256 random bits.

        Raises:
            RefusedError: There are too many, or the metadata is too large.
        """
        if len(self) >= self._max_sessions:
            raise RefusedError(
                f"{len(self)} sessions are open, the most there may be. Finish some.", kind="rate_limit_error"
            )
        if len(str(metadata or "")) > MAX_METADATA_CHARS:
            raise RefusedError(f"metadata must have at most {MAX_METADATA_CHARS} characters.", param="metadata")
        key = f"rl-{secrets.token_urlsafe(KEY_BYTES)}"
        session = Session(
            session_id=f"session-{secrets.token_hex(8)}",
            key=key,
            key_digest=_lookup(key),
            prompt_uid=prompt_uid,
            session_index=session_index,
            limits=limits or SessionLimits(),
            sampling=sampling,
            metadata=dict(metadata or {}),
        )
        if self._begin is not None:
            self._begin(session)
        self.adopt(session)
        return session

    def adopt(self, session: Session) -> None:
        """Serve a session that there is."""
        self._by_id[session.session_id] = self._by_key[session.key_digest] = session

    def by_key(self, key: str) -> Session:
        """The session whose key this is; keys are found by a digest, so that no time tells of their characters.

        Raises:
            RefusedError: It is nobody's.
        """
        digest = _lookup(key)
        session = self._by_key.get(digest)
        if session is None or not hmac.compare_digest(session.key_digest, digest):
            raise RefusedError(
                "the API key is not that of an open session. Use the key that the session was opened with.",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return session

    def by_id(self, session_id: str) -> Session:
        """A session by its id.

        Raises:
            RefusedError: There is none.
        """
        try:
            return self._by_id[session_id]
        except KeyError:
            raise RefusedError(f"there is no session {session_id[:80]!r}.", kind="not_found_error") from None

    def forget(self, session: Session) -> None:
        """Serve a session no longer."""
        session.is_finished = True
        self._by_id.pop(session.session_id, None)
        self._by_key.pop(session.key_digest, None)


def same_secret(expected: str, given: str) -> bool:
    """Whether two secrets are equal, in a time that tells nothing of them."""
    return hmac.compare_digest(expected.encode(), given.encode(errors="replace"))


def _lookup(key: str) -> bytes:
    return sha256(key.encode(errors="replace")).digest()
