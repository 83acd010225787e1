"""The gateway over HTTP: agents show the keys of their sessions, the owner of the sessions a key of its own."""

import gc
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_core.data import Json
from rl_core.errors import MissingExtraError, SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.gateway.asks import Answer, Ask, Live
from rl_rollout.gateway.journal import Journal
from rl_rollout.gateway.means import GatewayEngine
from rl_rollout.gateway.offers import Offers
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.service import PolicyService, ServiceOptions
from rl_rollout.gateway.sessions import Session, SessionLimits, Sessions
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.prompts.tokenizer import PromptTokenizer

try:
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    from rl_rollout.gateway.apis.anthropic_messages import AnthropicMessages, read_messages_request
    from rl_rollout.gateway.apis.chat_completions import ChatCompletions
    from rl_rollout.gateway.apis.completions import Completions, TokenPrompts
    from rl_rollout.gateway.apis.responses import Responses
    from rl_rollout.gateway.apis.streams import WireApi, events
    from rl_rollout.gateway.listening import Listener
    from rl_rollout.gateway.metrics import metrics_text
    from rl_rollout.gateway.owner import OwnerRoutes
    from rl_rollout.gateway.requests import Api, BodyReader, Handler, InWordsOf, secret_of, unless_gone
except ImportError as error:
    raise MissingExtraError(
        "the gateway needs Starlette, uvicorn, openai and anthropic. Install rl-rollout[gateway] as the README says."
    ) from error

NO_TRAINING = "x-rl-train"
OVERRIDDEN = "x-rl-overridden"


@settings_record
class GatewayOptions:
    """How the gateway listens.

    Attributes:
        host: Address; keys and texts are not encrypted, so anything but loopback needs a network that is trusted.
        port: 0 takes a free one.
        model: The policy's name; requests may name any model, and get this one.
        owner_key: Of the owner's routes; None makes one up.
        max_body_bytes: Longest request.
        client_timeout_s: Longest time for a request's head, for its body, and for which a client takes nothing of its
            answer.
        max_connections: At once; beyond, those close that have waited longest for a request. Half of `ulimit -n` is the
            most.
        max_sessions: Sessions that are open at once.
        grace_s: How long after its wall time a session can still be rewarded and finished; then it is removed.
        sessions: Folder in which sessions are kept; a gateway that was killed continues them. None keeps none.
        service: How requests are answered.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "policy"
    owner_key: str | None = None
    max_body_bytes: int = 16 << 20
    client_timeout_s: float = 30.0
    max_connections: int = 4096
    max_sessions: int = 4096
    grace_s: float = 600.0
    sessions: Path | None = None
    service: ServiceOptions = ServiceOptions()

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            SettingsError: A key that can be guessed, or a limit that is not positive.
        """
        if self.owner_key is not None and len(self.owner_key) < 32:
            raise SettingsError("owner_key must have at least 32 characters, chosen at random.")
        for name in ("max_body_bytes", "client_timeout_s", "max_connections", "max_sessions"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be above 0; found {getattr(self, name)}.")


class Gateway:
    """Serves sessions of agents with an engine.

    Attributes:
        sessions: Those that are open.
        journal: Keeps them on disk.
        service: Answers their requests.
        offers: Those that wait for workers elsewhere.
        owner_key: Of the owner's routes.
        url: Base of all routes, once started; agents of OpenAI's SDK append "/v1", those of Anthropic's do not.
    """

    def __init__(
        self,
        engine: GatewayEngine,
        tokenizer: PromptTokenizer,
        options: GatewayOptions | None = None,
        *,
        sampling: SamplingParams,
        on_finished: Callable[[Session, SessionResult], None] | None = None,
    ) -> None:
        """Try the chat template.

        Args:
            engine: Started.
            tokenizer: The policy's.
            options: How to listen.
            sampling: The run's, or the defaults of a gateway that stands alone.
            on_finished: Gets each session that its owner finishes over HTTP, with its audited trajectories.

        Raises:
            SettingsError: The chat template cannot join turns, or an option names what is not there.
        """
        self.options = options or GatewayOptions()
        self.service = PolicyService(engine, tokenizer, self.options.service)
        self.offers = Offers()
        self.journal = None if self.options.sessions is None else Journal(self.options.sessions)
        begin = None if self.journal is None else self.journal.begin
        self.sessions = Sessions(max_sessions=self.options.max_sessions, begin=begin)
        self.owner_key = self.options.owner_key or f"rl-owner-{secrets.token_urlsafe(32)}"
        self.url = ""
        self._sampling = sampling
        for session in self.journal.restore(self._drawn) if self.journal else ():
            self.sessions.adopt(session)
        self._on_finished = on_finished
        self._bodies = BodyReader(max_bytes=self.options.max_body_bytes, timeout_s=self.options.client_timeout_s)
        self._listener = Listener(
            self.application(),
            max_connections=self.options.max_connections,
            patience_s=self.options.client_timeout_s,
            every_second=self._remove_expired,
        )

    def bind(self) -> None:
        """Take the address; `start` does so by itself, but a taken one should be known before a model is loaded.

        Raises:
            SettingsError: The address cannot be listened on.
        """
        self._listener.bind(self.options.host, self.options.port)

    async def start(self) -> None:
        """Listen.

        Raises:
            SettingsError: The address cannot be listened on.
        """
        self.bind()
        self.url = f"http://{self.options.host}:{await self._listener.start()}"
        gc.freeze()  # else turns wait, 0.2 s at a time, for a look at half a million objects that are loaded for good

    async def close(self) -> None:
        """Listen no longer; requests under way get some seconds. Can be called twice."""
        await self._listener.close()
        gc.unfreeze()
        if self.journal is not None:
            self.journal.close()

    def open(
        self,
        prompt_uid: str,
        session_index: int = 0,
        *,
        sampling: Callable[[int], SamplingParams] | None = None,
        limits: SessionLimits | None = None,
        metadata: Mapping[str, Json] | None = None,
    ) -> Session:
        """A new session; its `key` is what the agent shows.

        Args:
            prompt_uid: Its group.
            session_index: Which session of the group.
            sampling: How a turn is drawn, by its number; the gateway's own sampling by default.
            limits: How far it goes.
            metadata: The owner's.

        Raises:
            RefusedError: Too many are open.
        """
        return self.sessions.open(
            prompt_uid=prompt_uid,
            session_index=session_index,
            sampling=sampling or self._drawn,
            limits=limits,
            metadata=metadata,
        )

    async def finish(self, session: Session) -> SessionResult:
        """End a session: its requests are aborted, and what it has is audited.

        Raises:
            RefusedError: That it is finished cannot be kept, so it is not.
        """
        session.keep(is_finished=True)
        self.sessions.forget(session)
        if session.running:
            await self.service.engine.abort(set(session.running))
        result = session.result()
        if result.failure is not None and result.failure.startswith("the audit"):
            self.service.counts["audit_failures"] += 1
        return result

    def _drawn(self, _turn: int) -> SamplingParams:
        return self._sampling

    def application(self) -> Starlette:
        """The routes, for a server of one's own."""
        agents: list[tuple[str, str, Api, Handler]] = [
            ("POST", "/v1/chat/completions", "openai", partial(self._answered, ChatCompletions)),
            ("POST", "/v1/completions", "openai", partial(self._answered, Completions)),
            ("POST", "/inference/v1/generate", "openai", partial(self._answered, TokenPrompts)),
            ("POST", "/{key}/inference/v1/generate", "openai", partial(self._answered, TokenPrompts)),
            ("GET", "/{key}/v1/models", "openai", self._models),
            ("POST", "/v1/messages", "anthropic", partial(self._answered, AnthropicMessages)),
            ("POST", "/v1/responses", "openai", partial(self._answered, Responses)),
            ("POST", "/v1/messages/count_tokens", "anthropic", self._count_tokens),
            ("GET", "/v1/models", "openai", self._models),
            ("GET", "/v1/models/{model:path}", "openai", self._model),
        ]
        return Starlette(
            routes=[
                *(Route(path, InWordsOf(api, handler), methods=[method]) for method, path, api, handler in agents),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                *OwnerRoutes(self, self._on_finished, self._bodies).routes(),
            ],
            exception_handlers={HTTPException: _no_route},
        )

    async def _remove_expired(self) -> None:
        """Remove sessions that nobody finished in time; what they have goes where finished ones go."""
        for session in self.sessions:
            if session.seconds_left > -self.options.grace_s:
                continue
            self.service.counts["sessions_expired"] += 1
            session.failure = session.failure or "its owner did not finish the session in time"
            result = await self.finish(session)
            if self._on_finished is not None:
                self._on_finished(session, result)

    async def _session(self, request: Request) -> Session:
        """The session whose key a request shows, to the end of its response."""
        session = self.sessions.by_key(secret_of(request))
        await request.state.stack.enter_async_context(session.attend())
        return session

    async def _answered(self, kind: Callable[[Mapping[str, Json], str], WireApi], request: Request) -> Response:
        session = await self._session(request)
        body = await self._bodies.read(request, session.session_id)
        api = kind(body, self.options.model)
        ask, is_stream = _with_headers(api.ask, request), bool(body.get("stream"))
        del body  # which is large, where it is
        if not is_stream:
            answer = await unless_gone(request, self.service.answer(session, ask))
            return _json(api.whole(answer), answer)
        live = await unless_gone(request, self.service.begin(session, ask))
        return _stream(events(live, api, request.is_disconnected), live)

    async def _count_tokens(self, request: Request) -> Response:
        session = await self._session(request)
        ask = read_messages_request(await self._bodies.read(request, session.session_id), needs_limit=False)
        return JSONResponse({"input_tokens": self.service.num_input_tokens(ask)})

    async def _models(self, request: Request) -> Response:
        await self._session(request)
        return JSONResponse({"object": "list", "data": [self._model_card()], "has_more": False})

    async def _model(self, request: Request) -> Response:
        await self._session(request)
        return JSONResponse(self._model_card())

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"status": "ok", "sessions": len(self.sessions)})

    async def _metrics(self, request: Request) -> Response:  # noqa: ARG002
        return PlainTextResponse(metrics_text(self.service, self.sessions))

    def _model_card(self) -> dict[str, Json]:
        length = self.service.engine.traits.max_model_len
        card = {"id": self.options.model, "object": "model", "created": 0, "owned_by": "rl-rollout"}
        return {**card, "type": "model", "display_name": self.options.model, "max_model_len": length}


async def _no_route(request: Request, error: Exception) -> Response:
    """An unknown path, as an error of the API."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    refused = RefusedError(f"there is no {request.method} {request.url.path[:200]} here.", kind="not_found_error")
    return JSONResponse(refused.as_openai(), status_code=status)


def _with_headers(ask: Ask, request: Request) -> Ask:
    """A request with what its headers say."""
    retries = request.headers.get("x-stainless-retry-count", "0")
    changes: dict[str, Any] = {
        "idempotency_key": request.headers.get("idempotency-key"),
        "retry_count": int(retries) if retries.isdecimal() and len(retries) < 10 else 0,
        "trains": request.headers.get(NO_TRAINING, "true").lower() not in ("false", "0", "no"),
    }
    return replace(ask, **changes)


def _override_header(overridden: Mapping[str, str]) -> dict[str, str]:
    if not overridden:
        return {}
    return {OVERRIDDEN: ", ".join(f"{name}={change}" for name, change in overridden.items())}


def _stream(events: AsyncIterator[str], live: Live) -> Response:
    """A response of events; whatever becomes of it, the answer does not go on without it."""

    async def end() -> None:
        live.answer.cancel()

    return StreamingResponse(
        events,
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", **_override_header(live.overridden)},
        background=BackgroundTask(end),
    )


def _json(body: str, answer: Answer) -> Response:
    """An answer that counts as delivered once it is sent."""

    async def delivered() -> None:
        answer.deliver()

    return Response(
        body,
        media_type="application/json",
        headers=_override_header(answer.overridden),
        background=BackgroundTask(delivered),
    )
