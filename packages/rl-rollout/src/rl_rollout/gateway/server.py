"""The gateway's HTTP server. Agents use the keys of their sessions; the owner of the sessions has a separate key."""

import gc
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from rl_core.data import Json
from rl_core.errors import MissingExtraError
from rl_core.record_fields import PositiveFloat, PositiveInt, settings_record
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.gateway.agent_requests import AgentRequest, Answer, StreamedAnswer
from rl_rollout.gateway.journal import Journal
from rl_rollout.gateway.refusals import RefusalKind, RefusedError
from rl_rollout.gateway.request_limits import GatewayEngine
from rl_rollout.gateway.service import PolicyService, ServiceOptions
from rl_rollout.gateway.sessions import Session, SessionLimits, Sessions, key_digest
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
    from rl_rollout.gateway.apis.responses import Responses, with_items
    from rl_rollout.gateway.apis.streams import WireApi, events
    from rl_rollout.gateway.listening import Listener
    from rl_rollout.gateway.owner import Offers, OwnerRoutes
    from rl_rollout.gateway.requests import Api, BodyReader, ErrorsInFormat, Handler, error_body, secret_of, unless_gone
    from rl_rollout.gateway.service import metrics_text
except ImportError as error:
    raise MissingExtraError(
        "the gateway needs Starlette, uvicorn, openai and anthropic. Install rl-rollout[gateway] as the README says."
    ) from error

KEY_BYTES = 32
MAX_METADATA_CHARS = 16_384
NO_TRAINING = "x-rl-train"
OVERRIDDEN = "x-rl-overridden"


@settings_record
class GatewayOptions:
    """Options of the gateway's server.

    Attributes:
        host: Address to listen on. Keys and texts are not encrypted: use only loopback or a trusted network.
        port: Port to listen on; 0 chooses a free one.
        model: The policy's name. Requests may name any model and always use the policy.
        owner_key: Key of the owner's routes, at least 32 characters; None generates one.
        max_body_bytes: Maximum size of a request body in bytes.
        client_timeout_s: Maximum time in seconds to receive a request's head, to receive its body, and without the
            client reading its answer.
        max_connections: Maximum number of connections, at most half of `ulimit -n`. Beyond it, the connections that
            have waited longest for a request are closed.
        max_sessions: Maximum number of open sessions.
        grace_s: Seconds after its wall time in which a session can still be rewarded and finished. Then it fails.
        sessions: Folder in which sessions are stored, so that a restarted gateway continues them; None stores none.
        service: Options of the answers.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "policy"
    owner_key: Annotated[str, MinLen(32)] | None = None
    max_body_bytes: PositiveInt = 16 << 20
    client_timeout_s: PositiveFloat = 30.0
    max_connections: PositiveInt = 4096
    max_sessions: PositiveInt = 4096
    grace_s: float = 600.0
    sessions: Path | None = None
    service: ServiceOptions = ServiceOptions()


class Gateway:
    """Serves sessions of agents with an engine.

    Attributes:
        sessions: The open sessions.
        journal: Stores sessions on disk; None without `options.sessions`.
        service: Answers the requests of the sessions.
        offers: Sessions offered to remote workers.
        owner_key: Key of the owner's routes.
        url: Base URL of all routes, once started. For OpenAI's SDK append "/v1"; for Anthropic's use it unchanged.
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
        """Check the chat template and restore stored sessions.

        Args:
            engine: A started engine.
            tokenizer: The policy's tokenizer.
            options: Options of the server.
            sampling: Sampling parameters of the run, or defaults of a standalone gateway.
            on_finished: Called with each session that is finished over HTTP or expires, and its audited result.

        Raises:
            SettingsError: The chat template cannot join turns, or an option names an unknown parser or token.
        """
        self.options = options or GatewayOptions()
        self.service = PolicyService(engine, tokenizer, self.options.service)
        self.offers = Offers()
        self.journal = None if self.options.sessions is None else Journal(self.options.sessions)
        self.sessions = Sessions()
        self.owner_key = self.options.owner_key or f"rl-owner-{secrets.token_urlsafe(KEY_BYTES)}"
        self.url = ""
        self._sampling = lambda _turn: sampling
        for session in self.journal.restore(self._sampling) if self.journal else ():
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
        """Bind the address. `start` also does this, but calling it first reports a used port before a model is loaded.

        Raises:
            SettingsError: The address is not available.
        """
        self._listener.bind(self.options.host, self.options.port)

    async def start(self) -> None:
        """Start the server and set `url`.

        Raises:
            SettingsError: The address is not available, or the engine does not support an option.
        """
        self.service.check_engine()
        self.bind()
        self.url = f"http://{self.options.host}:{await self._listener.start()}"
        gc.freeze()  # otherwise turns wait 0.2 s whenever the collector visits half a million permanent objects

    async def close(self) -> None:
        """Stop the server; running requests get some seconds to finish. Safe to call twice."""
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
        """Open a session. The agent authenticates with its `key`, of 256 random bits.

        Args:
            prompt_uid: uid of the session's group.
            session_index: Index of the session in its group.
            sampling: Returns the sampling parameters of a turn by its number; None uses those of the gateway.
            limits: Limits of the session.
            metadata: JSON object of the owner, stored and exported with the session.

        Raises:
            RefusedError: Too many sessions are open, or the metadata is too large.
        """
        if len(self.sessions) >= self.options.max_sessions:
            raise RefusedError(
                f"{len(self.sessions)} sessions are open, the maximum. Finish some.", kind="rate_limit_error"
            )
        if len(str(metadata or "")) > MAX_METADATA_CHARS:
            raise RefusedError(f"metadata must have at most {MAX_METADATA_CHARS} characters.", param="metadata")
        key = f"rl-{secrets.token_urlsafe(KEY_BYTES)}"
        session = Session(
            session_id=f"session-{secrets.token_hex(8)}",
            key=key,
            key_digest=key_digest(key),
            prompt_uid=prompt_uid,
            session_index=session_index,
            limits=limits or SessionLimits(),
            sampling=sampling or self._sampling,
            metadata=dict(metadata or {}),
        )
        if self.journal is not None:
            self.journal.begin(session)
        self.sessions.adopt(session)
        return session

    async def finish(self, session: Session) -> SessionResult:
        """Finish a session: abort its requests and audit its trajectories.

        Raises:
            RefusedError: The finished state cannot be stored; the session stays open.
        """
        session.keep(is_finished=True)
        self.sessions.forget(session)
        if session.running:
            await self.service.engine.abort(set(session.running))
        result = session.result()
        if result.failure is not None and result.failure.startswith("the audit"):
            self.service.counts["audit_failures"] += 1
        return result

    def application(self) -> Starlette:
        """Return the ASGI application, for use with another server."""
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
            ("GET", "/v1/models/{model:path}", "openai", self._models),
        ]
        return Starlette(
            routes=[
                *(Route(path, ErrorsInFormat(api, handler), methods=[method]) for method, path, api, handler in agents),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                *OwnerRoutes(self, self._on_finished, self._bodies).routes(),
            ],
            exception_handlers={HTTPException: _no_route},  # type: ignore[dict-item]  # Starlette: any Exception
        )

    async def _remove_expired(self) -> None:
        """Finish expired sessions as failed and pass them to `on_finished`."""
        for session in self.sessions:
            if session.seconds_left > -self.options.grace_s:
                continue
            self.service.counts["sessions_expired"] += 1
            session.failure = session.failure or "its owner did not finish the session in time"
            result = await self.finish(session)
            if self._on_finished is not None:
                self._on_finished(session, result)

    async def _session(self, request: Request) -> Session:
        """Return the session of a request's key; the request counts as attended until its response is sent."""
        request.state.session = session = self.sessions.by_key(secret_of(request))
        await request.state.stack.enter_async_context(session.attend())
        return session

    async def _answered(self, kind: Callable[[Mapping[str, Json], str], WireApi], request: Request) -> Response:
        session = await self._session(request)
        body = await self._bodies.read(request, session.session_id)
        await self.service.check_body(session, body)
        api = kind(with_items(body, session) if kind is Responses else body, self.options.model)
        ask, is_stream = _with_headers(api.ask, request), bool(body.get("stream"))
        del body  # it may be large
        try:
            if not is_stream:
                answer = await unless_gone(request, self.service.answer(session, ask))
                request.state.is_sampled = True
                return _json(api.whole(answer), answer)
            live = await unless_gone(request, self.service.begin(session, ask))
        except RefusedError as error:  # name the field as the request's API does
            error.param = api.names.get(error.param or "", error.param)
            raise
        request.state.is_sampled = True
        return _stream(events(live, api, request.is_disconnected), live)

    async def _count_tokens(self, request: Request) -> Response:
        session = await self._session(request)
        body = await self._bodies.read(request, session.session_id)
        await self.service.check_body(session, body)
        ask = read_messages_request(body, needs_limit=False)
        return JSONResponse({"input_tokens": await self.service.num_input_tokens(session, ask)})

    async def _models(self, request: Request) -> Response:
        await self._session(request)
        length = self.service.engine.traits.max_model_len
        card = {"id": self.options.model, "object": "model", "created": 0, "owned_by": "rl-rollout"}
        card |= {"type": "model", "display_name": self.options.model, "max_model_len": length}
        is_list = "model" not in request.path_params
        return JSONResponse({"object": "list", "data": [card], "has_more": False} if is_list else card)

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        has_failed = self.service.engine_failure is not None
        status = "engine failed" if has_failed else "ok"
        return JSONResponse({"status": status, "sessions": len(self.sessions)}, status_code=503 if has_failed else 200)

    async def _metrics(self, request: Request) -> Response:  # noqa: ARG002
        return PlainTextResponse(metrics_text(self.service, self.sessions))


WITHOUT_VERSION = ("/chat/completions", "/completions", "/responses", "/models")
"""Paths that OpenAI's clients request if their base URL lacks "/v1"."""


async def _no_route(request: Request, error: HTTPException) -> Response:
    """Return the error for an unknown path or method, without the path, which may contain a key."""
    kind: RefusalKind = "not_found_error"
    said = "unknown route. Expected one such as /v1/chat/completions, /v1/responses or /v1/messages."
    path, allowed = request.url.path, (error.headers or {}).get("Allow")
    if allowed is not None:
        kind = "invalid_request_error"
        said = f"the method of this route must be {allowed}; found {request.method[:10]}."
    elif path.startswith(WITHOUT_VERSION):
        said += ' The base URL of OpenAI\'s clients must end in "/v1".'
    elif path.startswith("/v1/v1/"):
        said += ' The base URL of Anthropic\'s clients must not end in "/v1".'
    api: Api = "anthropic" if path.startswith("/v1/messages") else "openai"
    body = error_body(RefusedError(said, kind=kind), request, api)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _with_headers(ask: AgentRequest, request: Request) -> AgentRequest:
    """Return the request with the values from its headers."""
    retries = request.headers.get("x-stainless-retry-count", "0")
    changes: dict[str, Any] = {
        "idempotency_key": request.headers.get("idempotency-key"),
        "retry_count": int(retries) if retries.isdecimal() and len(retries) < 10 else 0,
        "trains": request.headers.get(NO_TRAINING, "true").lower() not in ("false", "0", "no"),
    }
    return replace(ask, **changes)


def _override_header(overridden: Mapping[str, str]) -> dict[str, str]:
    changes = ", ".join(f"{name}={change}" for name, change in overridden.items())
    return {OVERRIDDEN: changes} if changes else {}


def _stream(events: AsyncIterator[str], live: StreamedAnswer) -> Response:
    """Return a response of events. The answer is cancelled when the response ends for any reason."""

    async def end() -> None:
        live.answer.cancel()

    return StreamingResponse(
        events,
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", **_override_header(live.overridden)},
        background=BackgroundTask(end),
    )


def _json(body: str, answer: Answer) -> Response:
    """Return a JSON response; the answer counts as delivered once it is sent."""

    async def delivered() -> None:
        answer.deliver()

    return Response(
        body,
        media_type="application/json",
        headers=_override_header(answer.overridden),
        background=BackgroundTask(delivered),
    )
