"""Sessions of the gateway: each with a key of its own, limits, and the tree of what was sampled for it."""

import hmac
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING

from rl_core.data import Json
from rl_core.errors import DataError, SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.tree import SessionTree
from rl_rollout.loops.protocol import SessionResult

if TYPE_CHECKING:
    import asyncio

    from rl_rollout.gateway.asks import Answer
    from rl_rollout.gateway.journal import SessionLog

KEY_BYTES = 32
MAX_METADATA_CHARS = 16_384
MAX_KEPT_ANSWERS = 16


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
        answers: Of the last requests that had an idempotency key.
        faults: Requests that the engine failed and that no retry made good, with its reasons.
        reward: The owner's.
        reward_components: Named parts of it.
        failure: Why the session cannot train.
        is_finished: Its requests are refused.
        opened_at: By the monotonic clock.
        running: Names of the requests under way, as the engine knows them.
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
    answers: "dict[str, asyncio.Future[Answer]]" = field(default_factory=dict)
    faults: dict[bytes, str] = field(default_factory=dict)
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    is_finished: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    running: set[str] = field(default_factory=set)
    log: "SessionLog | None" = None

    @contextmanager
    def admit(self) -> Iterator[tuple[int, str]]:
        """Count a request as running; gives its number, and its name for the engine.

        Raises:
            RefusedError: The session has ended, or a limit is reached.
        """
        limits = self.limits
        reached = [
            ("has ended", self.is_finished),
            (f"has had its {limits.max_turns} turns", self.counts["turns"] >= limits.max_turns),
            (f"has had its {limits.max_tokens} tokens", self.counts["sampled_tokens"] >= limits.max_tokens),
            (f"has lasted its {limits.wall_s:g} s", time.monotonic() - self.opened_at >= limits.wall_s),
        ]
        for reason, is_reached in reached:
            if is_reached:
                raise RefusedError(f"the session {reason}.", kind="permission_error", code="session_limit")
        if self.failure is not None:
            raise RefusedError(f"the session has failed: {self.failure}", kind="api_error")
        if len(self.running) >= limits.max_concurrent:
            raise RefusedError(
                f"the session has {len(self.running)} requests under way, its limit. Wait for one.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
        number = self.counts["turns"]
        name = f"{self.session_id}/{number}"
        self.counts["turns"] += 1
        self.running.add(name)
        try:
            yield number, name
        finally:
            self.running.discard(name)

    def keep_answer(self, key: str, answer: "asyncio.Future[Answer]") -> None:
        """Remember the answer to a request, for when it comes again."""
        self.answers[key] = answer
        while len(self.answers) > MAX_KEPT_ANSWERS:
            self.answers.pop(next(iter(self.answers)))

    def set_reward(self, reward: float, components: Mapping[str, float] | None = None) -> None:
        """Take the owner's reward; the last one counts.

        Raises:
            DataError: It is no finite number.
        """
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

        What the engine could not serve, and no retry made good, fails the session: it is never a reward of 0.
        """
        rows = self.tree.trajectories(self.prompt_uid, self.session_index)
        failure = self.failure or next(iter(self.faults.values()), None)
        if failure is None and not rows:
            failure = "the agent asked for nothing that trains"
        try:
            self.tree.audit(rows)
        except DataError as error:
            failure = f"the audit refuses the session: {error}"
        if failure is not None:
            return SessionResult(trajectories=rows, failure=failure)
        extras = {"session": self.session_id, **self.counts}
        components = self.reward_components
        *others, last = (replace(row, reward=self.reward, reward_components=components) for row in rows)
        return SessionResult(trajectories=(*others, replace(last, extras={**last.extras, **extras})))


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
