"""Sessions of the gateway. Each has its own key, limits and tree of sampled tokens."""

import asyncio
import hmac
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Annotated, Protocol

from annotated_types import Gt

from rl_core.data import Json, Trajectory
from rl_core.errors import DataError
from rl_core.record_fields import PositiveInt, settings_record
from rl_rollout.audit import audit_session
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.gateway.agent_requests import Answer
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.tree import Sample, SessionTree
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rewards.outputs import preview_error

MAX_KEPT_OVERHEADS = 64


@settings_record
class SessionLimits:
    """Limits of a session. Requests beyond a limit are refused; earlier samples are kept.

    Attributes:
        max_turns: Maximum number of requests that were answered, or refused as too long for the context.
        max_tokens: Maximum number of sampled tokens; no request starts beyond it.
        max_concurrent: Maximum number of concurrent requests.
        wall_s: Maximum duration in seconds from the opening, without the time in which no gateway runs.
    """

    max_turns: PositiveInt = 256
    max_tokens: PositiveInt = 1 << 20
    max_concurrent: PositiveInt = 16
    wall_s: Annotated[float, Gt(0)] = 3600.0


class SessionLog(Protocol):
    """Records a session on disk; see `SessionFile`."""

    def said(self, sample: Sample, digests: Sequence[bytes]) -> None:
        """Record a sample."""

    def delivered(self, samples: Sequence[Sample]) -> None:
        """Record that the client received samples."""

    def state(self, *, is_finished: bool) -> None:
        """Record the session's state."""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One run of an agent.

    Attributes:
        session_id: Id by which the owner refers to the session.
        key: The agent's key; never logged. Empty if an earlier gateway process opened the session.
        key_digest: SHA-256 of the key.
        prompt_uid: uid of the session's group.
        session_index: Index of the session in its group.
        limits: Limits of the session.
        sampling: Returns the sampling parameters of a turn by its number.
        metadata: JSON object of the owner, stored and exported with the session.
        tree: Prompts and samples.
        counts: Event counts: turns, forks, roots by reason and others.
        overheads_ms: Time of the most recent turns in milliseconds, without the engine's time.
        answers: Answers to the most recent requests with an idempotency key, by that key and the conversation's digest.
        images: Size in bytes of each image that requests had, by digest.
        faults: Reasons of failed requests that were not retried successfully, by the conversation's digest.
        reward: Reward set by the owner; None until then.
        reward_components: Named parts of the reward.
        failure: Why the session cannot train; None if it can.
        is_finished: True once the session refuses requests.
        opened_at: Opening time by the monotonic clock.
        running: Request ids of the running requests, as the engine knows them.
        num_attended: Number of client requests whose response is incomplete.
        encoding: Held while a long text is encoded.
        log: Records the session on disk; None if sessions are not stored.
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
    answers: dict[str, "asyncio.Future[Answer]"] = field(default_factory=dict)
    images: dict[str, int] = field(default_factory=dict)
    faults: dict[bytes, str] = field(default_factory=dict)
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    is_finished: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    running: set[str] = field(default_factory=set)
    num_attended: int = 0
    encoding: asyncio.Lock = field(default_factory=asyncio.Lock)
    log: SessionLog | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds left of the wall time; negative once it has passed."""
        return self.opened_at + self.limits.wall_s - time.monotonic()

    @asynccontextmanager
    async def attend(self) -> AsyncIterator[None]:
        """Count a client's request until its response is complete. It is cancelled when the wall time has passed.

        Raises:
            RefusedError: The session has ended, or too many requests are running.
        """
        self._check_is_open()
        if self.num_attended >= self.limits.max_concurrent:
            raise RefusedError(
                f"the session has {self.num_attended} running requests, its limit. Wait for one to finish.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
        self.num_attended += 1
        try:
            async with asyncio.timeout(self.seconds_left) as deadline:
                yield
        except TimeoutError:
            if deadline.expired():
                raise _over(f"has reached its limit of {self.limits.wall_s:g} s") from None
            raise
        finally:
            self.num_attended -= 1

    def check_may_ask(self) -> None:
        """Check whether the session accepts a request now.

        Raises:
            RefusedError: The session has ended or failed, or a limit is reached.
        """
        self._check_is_open()
        if self.counts["turns"] >= self.limits.max_turns:
            raise _over(f"has reached its limit of {self.limits.max_turns} turns")
        if self.counts["sampled_tokens"] >= self.limits.max_tokens:
            raise _over(f"has reached its limit of {self.limits.max_tokens} tokens")
        if self.failure is not None:
            raise RefusedError(f"the session has failed: {self.failure}", kind="api_error")

    @contextmanager
    def admit(self) -> Iterator[tuple[int, str]]:
        """Admit a request; yield the number of its turn, which is not counted yet, and its unique name.

        Raises:
            RefusedError: The session has ended or failed, or a limit is reached.
        """
        self.check_may_ask()
        number = self.counts["turns"]
        name = f"{self.session_id}/{number}"
        self.running.add(name)
        try:
            yield number, name
        except Exception as error:
            if not isinstance(error, RefusedError):
                self.note_own_fault(error)
            raise
        finally:
            self.running.discard(name)

    def note_fault(self, digest: bytes, reason: str) -> None:
        """Record a failed request, unless the session is finished: finishing aborts requests."""
        if not self.is_finished:
            self.faults[digest] = reason

    def note_own_fault(self, error: Exception) -> None:
        """Record a fault of the gateway, which fails the session even if a retry succeeds."""
        self.note_fault(b"", f"the gateway failed: {preview_error(error)}")
        with suppress(RefusedError):  # if this cannot be stored, the session has failed too
            self.keep()

    def set_reward(self, reward: float, components: Mapping[str, float] | None = None) -> None:
        """Set the reward; a later call replaces it.

        Raises:
            DataError: The reward or a component is not a finite number, or the components are not a mapping.
            RefusedError: The reward cannot be stored.
        """
        if not isinstance(components or {}, Mapping):
            raise DataError(f"components of session {self.session_id} must be an object; found {components!r:.80}.")
        for name, value in {"reward": reward, **(components or {})}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise DataError(f"{name} of session {self.session_id} must be a finite number; found {value!r}.")
        self.reward, self.reward_components = float(reward), dict(components or {})
        self.keep()

    def keep(self, *, is_finished: bool = False) -> None:
        """Record the session's state except its turns on disk, if sessions are stored.

        Raises:
            RefusedError: The state cannot be written.
        """
        if self.log is not None:
            self.log.state(is_finished=is_finished)

    def result(self) -> SessionResult:
        """Return the session's audited trajectories with its reward, or without reward and with the failure.

        A failed request that was not retried successfully fails the session; it never becomes a reward of 0. The last
        trajectory has the session's counts in its extra "gateway".
        """
        rows = self._told(self.tree.trajectories(self.prompt_uid, self.session_index))
        failure = self.failure or next(iter(self.faults.values()), None)
        if failure is None and not rows:
            failure = "the agent made no request that trains"
            if self.counts["other_sampling"]:
                failure += ': its client decided on the sampling. Set decided_by = "run" (--decided-by run)'
        try:
            audit_session(rows, self.tree.spans())
        except DataError as error:
            failure = f"the audit rejected the session: {error}"
        if failure is not None:
            return SessionResult(trajectories=rows, failure=failure)
        components = self.reward_components
        scored = (replace(row, reward=self.reward, reward_components=components) for row in rows)
        return SessionResult(trajectories=tuple(scored))

    def _told(self, rows: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """Add the session's id and counts to the extras of the last trajectory."""
        if not rows:
            return ()
        overheads = [round(each, 2) for each in self.overheads_ms]
        counts = {**self.counts, "untrained_tokens": self.tree.num_untrained_tokens, "overhead_ms": overheads}
        *others, last = rows
        return (*others, replace(last, extras={**last.extras, "session": self.session_id, "gateway": counts}))

    def _check_is_open(self) -> None:
        if self.is_finished:
            raise _over("has ended")
        if self.seconds_left <= 0:
            raise _over(f"has reached its limit of {self.limits.wall_s:g} s")


class Sessions:
    """The open sessions, by key and by id."""

    def __init__(self) -> None:
        """Start without sessions."""
        self._by_key: dict[bytes, Session] = {}
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def adopt(self, session: Session) -> None:
        """Serve an existing session."""
        self._by_id[session.session_id] = self._by_key[session.key_digest] = session

    def by_key(self, key: str) -> Session:
        """Return the session with a key. The lookup uses a digest, so that its duration reveals nothing about keys.

        Raises:
            RefusedError: No open session has this key.
        """
        digest = key_digest(key)
        session = self._by_key.get(digest)
        if session is None or not hmac.compare_digest(session.key_digest, digest):
            raise RefusedError(
                "the API key belongs to no open session. Use the key that was returned when the session was opened.",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return session

    def by_id(self, session_id: str) -> Session:
        """Return the session with an id.

        Raises:
            RefusedError: No open session has this id.
        """
        try:
            return self._by_id[session_id]
        except KeyError:
            raise RefusedError(f"no open session has the id {session_id[:80]!r}.", kind="not_found_error") from None

    def forget(self, session: Session) -> None:
        """Stop serving a session."""
        session.is_finished = True
        self._by_id.pop(session.session_id, None)
        self._by_key.pop(session.key_digest, None)


def _over(reason: str) -> RefusedError:
    return RefusedError(f"the session {reason}.", kind="permission_error", code="session_limit")


def key_digest(key: str) -> bytes:
    """Return the digest by which a session is found."""
    return sha256(key.encode(errors="replace")).digest()
