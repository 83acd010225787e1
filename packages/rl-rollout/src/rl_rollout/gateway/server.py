"""The gateway over HTTP: agents show the keys of their sessions, the owner of the sessions a key of its own."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_core.data import Json
from rl_core.errors import MissingExtraError, NotReadyError, SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams
from rl_rollout.gateway.asks import Ask, Live
from rl_rollout.gateway.journal import Journal
from rl_rollout.gateway.refusals import refused_field
from rl_rollout.gateway.service import PolicyService, ServiceOptions
from rl_rollout.gateway.sessions import Session, SessionLimits, Sessions
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.prompts.tokenizer import PromptTokenizer

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    from rl_rollout.gateway.anthropic_messages import messages_response, read_messages_request
    from rl_rollout.gateway.chat_completions import chat_response, read_chat_request
    from rl_rollout.gateway.metrics import metrics_text
    from rl_rollout.gateway.owner import OwnerRoutes
    from rl_rollout.gateway.requests import Api, Handler, in_words_of, read_json, secret_of, unless_gone
    from rl_rollout.gateway.streams import chat_stream, messages_stream
except ImportError as error:
    raise MissingExtraError(
        "the gateway needs Starlette, uvicorn, openai and anthropic. Install rl-rollout[gateway] as the README says."
    ) from error

NO_TRAINING = "x-rl-train"
OVERRIDDEN = "x-rl-overridden"
START_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 5


@settings_record
class GatewayOptions:
    """How the gateway listens.

    Attributes:
        host: Address; keys and texts are not encrypted, so anything but loopback needs a network that is trusted.
        port: 0 takes a free one.
        model: The policy's name; requests may name any model, and get this one.
        owner_key: Of the owner's routes; None makes one up.
        max_body_bytes: Longest request.
        body_timeout_s: Longest time of receiving one.
        max_connections: Connections at once; beyond, requests get 503.
        max_sessions: Sessions that are open at once.
        sessions: Folder in which sessions are kept; a gateway that was killed goes on with them. None keeps none.
        service: How requests are answered.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "policy"
    owner_key: str | None = None
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 30.0
    max_connections: int = 4096
    max_sessions: int = 4096
    sessions: Path | None = None
    service: ServiceOptions = ServiceOptions()

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            SettingsError: A key that can be guessed, or a limit that is not positive.
        """
        if self.owner_key is not None and len(self.owner_key) < 32:
            raise SettingsError("owner_key must have at least 32 characters, chosen at random.")
        for name in ("max_body_bytes", "body_timeout_s", "max_connections", "max_sessions"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be above 0; found {getattr(self, name)}.")


class Gateway:
    """Serves sessions of agents with an engine.

    Attributes:
        sessions: Those that are open.
        journal: Keeps them on disk.
        service: Answers their requests.
        owner_key: Of the owner's routes.
        url: Base of all routes, once started; agents of OpenAI's SDK append "/v1", those of Anthropic's do not.
    """

    def __init__(
        self,
        engine: RolloutEngine,
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
        self.journal = None if self.options.sessions is None else Journal(self.options.sessions)
        begin = None if self.journal is None else self.journal.begin
        self.sessions = Sessions(max_sessions=self.options.max_sessions, begin=begin)
        self.owner_key = self.options.owner_key or f"rl-owner-{secrets.token_urlsafe(32)}"
        self.url = ""
        self._sampling = sampling
        for session in self.journal.restore(self._drawn) if self.journal else ():
            self.sessions.adopt(session)
        self._on_finished = on_finished
        self._listening: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self) -> socket.socket:
        """Take the address; `start` does so by itself, but a taken one should be known before a model is loaded.

        Raises:
            SettingsError: The address cannot be listened on.
        """
        options = self.options
        try:
            self._listening = self._listening or socket.create_server((options.host, options.port), backlog=2048)
        except (OSError, OverflowError) as error:
            raise SettingsError(f"the gateway cannot listen on {options.host}:{options.port}: {error}.") from error
        return self._listening

    async def start(self) -> None:
        """Listen.

        Raises:
            SettingsError: The address cannot be listened on.
        """
        options, listening = self.options, self.bind()
        config = uvicorn.Config(
            self.application(),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=options.max_connections,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=CLOSE_DEADLINE_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
        async with asyncio.timeout(START_DEADLINE_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                    raise NotReadyError("the gateway's server ended as it began.")
                await asyncio.sleep(0.005)
        self.url = f"http://{options.host}:{listening.getsockname()[1]}"

    async def close(self) -> None:
        """Listen no longer; requests under way get some seconds. Can be called twice."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None
        if self._listening is not None:
            self._listening.close()
            self._listening = None
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
        owner = OwnerRoutes(self, self._on_finished, max_bytes=self.options.max_body_bytes)
        agents: list[tuple[str, Api, Handler]] = [
            ("/v1/chat/completions", "openai", self._chat),
            ("/v1/messages", "anthropic", self._messages),
            ("/v1/messages/count_tokens", "anthropic", self._count_tokens),
        ]
        return Starlette(
            routes=[
                *(Route(path, in_words_of(api, handler), methods=["POST"]) for path, api, handler in agents),
                Route("/v1/models", in_words_of("openai", self._models)),
                Route("/v1/models/{model:path}", in_words_of("openai", self._model)),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                *owner.routes(),
            ]
        )

    async def _chat(self, request: Request) -> Response:
        session = self.sessions.by_key(secret_of(request))
        body = await self._body(request)
        ask = _with_headers(read_chat_request(body), request)
        if not body.get("stream"):
            answer = await unless_gone(request, self.service.answer(session, ask))
            with_logprobs = bool(body.get("logprobs"))
            whole = chat_response(answer, model=self.options.model, with_logprobs=with_logprobs)
            return _json(whole.model_dump_json(exclude_unset=True), answer.overridden, answer.deliver)
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise refused_field("stream_options", options, "an object")
        live = await self.service.begin(session, ask)
        events = chat_stream(
            live,
            model=self.options.model,
            num_choices=ask.num_choices,
            with_usage=bool(options.get("include_usage")),
        )
        return _stream(events, live)

    async def _messages(self, request: Request) -> Response:
        session = self.sessions.by_key(secret_of(request))
        body = await self._body(request)
        ask = _with_headers(read_messages_request(body), request)
        if not body.get("stream"):
            answer = await unless_gone(request, self.service.answer(session, ask))
            whole = messages_response(answer, model=self.options.model)
            return _json(whole.model_dump_json(), answer.overridden, answer.deliver)
        live = await self.service.begin(session, ask)
        return _stream(messages_stream(live, model=self.options.model), live)

    async def _count_tokens(self, request: Request) -> Response:
        self.sessions.by_key(secret_of(request))
        ask = read_messages_request(await self._body(request), needs_limit=False)
        return JSONResponse({"input_tokens": self.service.num_input_tokens(ask)})

    async def _models(self, request: Request) -> Response:
        self.sessions.by_key(secret_of(request))
        return JSONResponse({"object": "list", "data": [self._model_card()], "has_more": False})

    async def _model(self, request: Request) -> Response:
        self.sessions.by_key(secret_of(request))
        return JSONResponse(self._model_card())

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"status": "ok", "sessions": len(self.sessions)})

    async def _metrics(self, request: Request) -> Response:  # noqa: ARG002
        return PlainTextResponse(metrics_text(self.service, self.sessions))

    def _model_card(self) -> dict[str, Json]:
        length = self.service.engine.traits.max_model_len
        card = {"id": self.options.model, "object": "model", "created": 0, "owned_by": "rl-rollout"}
        return {**card, "type": "model", "display_name": self.options.model, "max_model_len": length}

    async def _body(self, request: Request) -> dict[str, Json]:
        return await read_json(request, max_bytes=self.options.max_body_bytes, timeout_s=self.options.body_timeout_s)


class _Server(uvicorn.Server):
    """One that leaves the signals of the process alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _with_headers(ask: Ask, request: Request) -> Ask:
    """A request with what its headers say."""
    retries = request.headers.get("x-stainless-retry-count", "0")
    changes: dict[str, Any] = {
        "idempotency_key": request.headers.get("idempotency-key"),
        "retry_count": int(retries) if retries.isdecimal() else 0,
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


def _json(body: str, overridden: Mapping[str, str], then: Callable[[], None]) -> Response:
    """An answer that counts as delivered once it is sent."""

    async def delivered() -> None:
        then()

    return Response(
        body,
        media_type="application/json",
        headers=_override_header(overridden),
        background=BackgroundTask(delivered),
    )
