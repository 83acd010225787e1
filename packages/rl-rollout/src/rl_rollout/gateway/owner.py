"""The owner's routes over HTTP: open, offer, reward and finish sessions."""

import asyncio
import hmac
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_core.data import Json, Trajectory
from rl_core.errors import RolloutError, SettingsError
from rl_core.registry import unknown_name
from rl_rollout.gateway.journal import Journal
from rl_rollout.gateway.refusals import RefusedError, refused_field
from rl_rollout.gateway.requests import BodyReader, ErrorsInFormat, secret_of, unless_gone
from rl_rollout.gateway.sessions import Session, SessionLimits, Sessions
from rl_rollout.loops.options import read_options
from rl_rollout.loops.protocol import SessionResult

CLAIM_WAIT_S, MAX_CLAIM_WAIT_S = 30.0, 600.0
OF_SESSION = ("session_index", "metadata", "counts", "reward", "failure", "is_finished")
ARRAYS = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")


@dataclass(slots=True, kw_only=True, eq=False)
class Offer:
    """A session offered to workers.

    Attributes:
        session: The session.
        shown: Fields that its worker receives in addition to the key.
        ends_at: Deadline by the monotonic clock; the session fails if it is not finished by then.
        is_claimed: True once a worker has claimed it.
        is_finished: Set once the worker has finished it.
    """

    session: Session
    shown: Mapping[str, Json]
    ends_at: float
    is_claimed: bool = False
    is_finished: asyncio.Event = field(default_factory=asyncio.Event)


class Offers:
    """Queue of offers; each goes to one worker."""

    def __init__(self) -> None:
        """Start without offers."""
        self._waiting: asyncio.Queue[Offer] = asyncio.Queue()
        self._by_id: dict[str, Offer] = {}

    async def finished(self, session: Session, shown: Mapping[str, Json], *, deadline_s: float) -> None:
        """Offer a session and wait until its worker has finished it.

        Raises:
            RolloutError: No worker claimed or finished the session by the deadline.
        """
        offer = Offer(session=session, shown=shown, ends_at=time.monotonic() + deadline_s)
        self._by_id[session.session_id] = offer
        self._waiting.put_nowait(offer)
        try:
            async with asyncio.timeout(deadline_s):
                await offer.is_finished.wait()
        except TimeoutError:
            what = "finished by its worker" if offer.is_claimed else "claimed by a worker"
            raise RolloutError(f"the session was not {what} within {deadline_s:g} s.") from None
        finally:
            del self._by_id[session.session_id]

    async def claim(self) -> Offer:
        """Wait for the next offer and claim it for the caller."""
        while True:
            offer = await self._waiting.get()
            if offer.session.session_id in self._by_id:
                offer.is_claimed = True
                return offer

    def finish(self, session: Session) -> bool:
        """Mark a session as finished; return False if it was not offered."""
        offer = self._by_id.get(session.session_id)
        if offer is not None:
            offer.is_finished.set()
        return offer is not None


class OwnedGateway(Protocol):
    """What its owner's routes use of a `Gateway`."""

    sessions: Sessions
    journal: Journal | None
    offers: Offers
    owner_key: str
    url: str

    def open(
        self, prompt_uid: str, session_index: int, *, limits: SessionLimits, metadata: Mapping[str, Json]
    ) -> Session:
        """Open a session."""

    async def finish(self, session: Session) -> SessionResult:
        """Finish a session."""


class OwnerRoutes:
    """Routes below /sessions; each requires the owner's key."""

    def __init__(
        self,
        gateway: OwnedGateway,
        on_finished: Callable[[Session, SessionResult], None] | None,
        bodies: BodyReader,
    ) -> None:
        """Serve a gateway's sessions.

        Args:
            gateway: The gateway.
            on_finished: Called with each finished session and its result.
            bodies: Reads request bodies.
        """
        self._gateway = gateway
        self._on_finished = on_finished
        self._bodies = bodies
        self._taken: defaultdict[str, set[int]] = defaultdict(set)
        for group, index in gateway.journal.names() if gateway.journal else ():
            self._taken[group].add(index)

    def routes(self) -> list[Route]:
        """Return all routes."""
        posts = {"": self._open, "/claim": self._claim, "/{id}/reward": self._reward, "/{id}/finish": self._finish}
        return [
            *(Route(f"/sessions{at}", ErrorsInFormat("openai", post), methods=["POST"]) for at, post in posts.items()),
            Route("/sessions/{id}", ErrorsInFormat("openai", self._show), methods=["GET"]),
        ]

    async def _open(self, request: Request) -> Response:
        body = await self._body(request, "group", "session_index", "limits", "metadata")
        group = body.get("group")
        if not isinstance(group, str) or not group:
            raise refused_field("group", group, "a string, the uid of the session's prompt")
        taken = self._taken[group]
        index = body.get("session_index")
        if index is None:
            index = max(taken, default=-1) + 1
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise refused_field("session_index", index, "an integer of at least 0")
        if index in taken:
            raise RefusedError(
                f"group {group[:80]!r} already has a session {index}. Omit session_index to get the next one.",
                param="session_index",
            )
        metadata = body.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise refused_field("metadata", metadata, "an object")
        session = self._gateway.open(group, index, limits=_limits(body.get("limits")), metadata=metadata)
        taken.add(index)
        opened = {"id": session.session_id, "key": session.key, "base_url": self._gateway.url, "session_index": index}
        return JSONResponse(opened, status_code=201)

    async def _claim(self, request: Request) -> Response:
        """Wait for an offered session; respond with 204 if there is none in time."""
        body = await self._body(request, "wait_s")
        wait_s = body.get("wait_s", CLAIM_WAIT_S)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_CLAIM_WAIT_S:
            raise refused_field("wait_s", wait_s, f"a number of seconds from 0 to {MAX_CLAIM_WAIT_S:g}")
        try:
            async with asyncio.timeout(wait_s):
                offer = await unless_gone(request, self._gateway.offers.claim())
        except TimeoutError:
            return Response(status_code=204)
        session, seconds_left = offer.session, offer.ends_at - time.monotonic()
        opened = {"id": session.session_id, "key": session.key, "base_url": str(request.base_url).rstrip("/")}
        return JSONResponse({**opened, **offer.shown, "seconds_left": seconds_left})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(_as_json(self._session(request)))

    async def _reward(self, request: Request) -> Response:
        body = await self._body(request, "reward", "components")
        session = self._gateway.sessions.by_id(request.path_params["id"])
        session.set_reward(body.get("reward"), body.get("components"))  # type: ignore[arg-type]  # checked there
        return JSONResponse(_as_json(session))

    async def _finish(self, request: Request) -> Response:
        body = await self._body(request, "reward", "components", "failure")
        session = self._session(request)
        if session.is_finished:  # a retry whose first answer was lost
            result = session.result()
        else:
            if body.get("reward") is not None:
                session.set_reward(body["reward"], body.get("components"))
            if body.get("failure"):
                session.failure = str(body["failure"])
            if self._gateway.offers.finish(session):
                return JSONResponse(_as_json(session))
            if session.reward is None and session.failure is None:
                raise RefusedError("finish needs a reward, or a failure that says why there is none.", param="reward")
            result = await self._gateway.finish(session)
            if self._on_finished is not None:
                self._on_finished(session, result)
        rows = [] if result.failure else [_row(row) for row in result.trajectories]
        return JSONResponse({**_as_json(session), "failure": result.failure, "trajectories": rows})

    def _session(self, request: Request) -> Session:
        self._admit(request)
        session_id, journal = request.path_params["id"], self._gateway.journal
        finished = None if journal is None else journal.find_finished(session_id)
        return finished or self._gateway.sessions.by_id(session_id)

    async def _body(self, request: Request, *known: str) -> dict[str, Json]:
        self._admit(request)
        body = await self._bodies.read(request)
        for name in body:
            if name not in known:
                raise RefusedError(unknown_name("field", name[:80], known), param=name[:80])
        return body

    def _admit(self, request: Request) -> None:
        expected, secret = self._gateway.owner_key.encode(), secret_of(request).encode(errors="replace")
        if not hmac.compare_digest(expected, secret):  # in a time independent of their content
            raise RefusedError("this route needs the owner's key.", kind="authentication_error", code="invalid_api_key")


def _limits(given: Json) -> SessionLimits:
    if given is None:
        return SessionLimits()
    if not isinstance(given, dict):
        raise refused_field("limits", given, "an object")
    try:
        return read_options(SessionLimits, given, where="limits")
    except SettingsError as error:
        raise RefusedError(str(error), param="limits") from error


def _as_json(session: Session) -> dict[str, Json]:
    named = {"id": session.session_id, "group": session.prompt_uid}
    return {**named, **{name: getattr(session, name) for name in OF_SESSION}}


def _row(row: Trajectory) -> dict[str, Json]:
    arrays = {name: getattr(row, name).tolist() for name in ARRAYS}
    arrays["images"] = [[one.digest, one.start, one.length] for one in row.images]
    return {**arrays, **{name: getattr(row, name) for name in ("output_index", "parent", "finish_reason", "reward")}}
