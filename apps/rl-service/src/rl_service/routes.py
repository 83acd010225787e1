"""The service's HTTP routes."""

import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from rl_core.data import Json
from rl_rollout.gateway import BodyReader, ErrorsInFormat, RefusedError, secret_of
from rl_service import requests
from rl_service.checkpoints import Saved, expiry
from rl_service.clients import TrainingClient
from rl_service.losses import ForwardBackward
from rl_service.service import TrainingService
from rl_service.settings import ServiceSettings
from rl_service.wire import PROTOBUF, decompressed, read_forward_backward, read_place_of_pass

Handler = Callable[[HttpRequest], Awaitable[Response]]
API = "/api/v1"
CHECKPOINT = "/training_runs/{run}/checkpoints/{segment}/{name}"
DOWNLOAD_S = 3600
MAX_JSON_BYTES = 1 << 20
"""Maximum size of a request without prompts; the journal keeps its metadata."""
MAX_HEAD_BYTES = 1 << 18
"""Size of the kept beginning of a pass, which is more than one block of zstd."""
WRONG_KEY = "the service needs its key as X-API-Key. Set TINKER_API_KEY to the text of its file `key`."
GONE = 410
"""Status of a session that has ended, and of a result that its client may ask for with a new request."""


class Routes:
    """Serves a service over HTTP to clients that have its key."""

    def __init__(self, service: TrainingService, settings: ServiceSettings, key: str) -> None:
        """Serve a service.

        Args:
            service: The service.
            settings: Its settings.
            key: The key of all clients.
        """
        self._service, self._settings, self._key = service, settings, key
        server = settings.server
        self._bodies = BodyReader(max_bytes=server.max_body_bytes, timeout_s=server.client_timeout_s)

    def application(self) -> Starlette:
        """Return the ASGI application."""
        service, of, trained = self._service, self._posted, self._trained
        posts: Mapping[str, Handler] = {
            "/client/config": of(requests.ClientConfig, self._client_config),
            "/client/dynamic_config": of(requests.ClientConfig, lambda _: {"sample_cancel_enabled": True}),
            "/create_session": of(requests.CreateSession, service.create_session),
            "/session_heartbeat": self._heartbeat,
            "/sessions/{id}/finish": self._finish,
            "/create_model": of(requests.CreateModel, service.create_model),
            "/get_info": of(requests.OfModel, service.get_info),
            "/forward_backward": self._forward_backward,
            "/optim_step": trained(requests.OptimStep, service.train),
            "/save_weights": trained(requests.SaveWeights, service.train),
            "/save_weights_for_sampler": trained(requests.SaveWeightsForSampler, service.train),
            "/save_weights_external": trained(requests.SaveWeightsExternal, service.train),
            "/load_weights": trained(requests.LoadWeights, service.load_weights),
            "/create_sampling_session": of(requests.CreateSamplingSession, service.create_sampling_session),
            "/asample": of(requests.Sample, service.sample),
            "/retrieve_future": self._retrieve,
            "/cancel_future": of(requests.CancelFuture, service.cancel),
            "/weights_info": of(requests.WeightsPath, self._weights_info),
            "/telemetry": self._telemetry,
        }
        gets: Mapping[str, Handler] = {
            "/healthz": self._health,
            "/get_server_capabilities": self._capabilities,
            "/samplers/{id}": self._sampler,
            "/training_runs": self._runs,
            "/training_runs/{run}": self._run,
            "/training_runs/{run}/checkpoints": self._checkpoints,
            "/checkpoints": self._checkpoints,
            CHECKPOINT + "/external_weights_urls": self._downloads,
            "/downloads/{run}/{segment}/{name}/{file}": self._download,
        }
        table = [("POST", path, handler) for path, handler in posts.items()]
        table += [("GET", path, handler) for path, handler in gets.items()]
        table += [("DELETE", CHECKPOINT, self._delete), ("PUT", CHECKPOINT + "/ttl", self._set_ttl)]
        return Starlette(
            routes=[
                Route(API + path, ErrorsInFormat("openai", self._admitting(handler)), methods=[method])
                for method, path, handler in table
            ],
            exception_handlers={HTTPException: _no_route},  # type: ignore[dict-item]  # Starlette: any Exception
        )

    def _admitting(self, handler: Handler) -> Handler:
        async def admitted(request: HttpRequest) -> Response:
            secret = secret_of(request).encode(errors="replace")
            if handler not in (self._health, self._download) and not hmac.compare_digest(self._key.encode(), secret):
                raise RefusedError(WRONG_KEY, kind="authentication_error")
            return await handler(request)

        return admitted

    def _posted(self, kind: type[requests.RequestT], run: Callable[[requests.RequestT], dict[str, Json]]) -> Handler:
        async def handled(request: HttpRequest) -> Response:
            return JSONResponse(run(await self._read(request, kind)))

        return handled

    def _trained(self, kind: type[requests.RequestT], run: Callable[[requests.RequestT], dict[str, Json]]) -> Handler:
        """Return the handler of a training request. One that cannot be read fails in its turn."""

        async def handled(request: HttpRequest) -> Response:
            content = await self._content(request)
            try:
                read = _read_json(content, kind)
            except RefusedError as error:
                if (place := requests.read_place(content)) is None:
                    raise
                unreadable = requests.Unreadable(model_id=place.model_id, seq_id=place.seq_id, problem=error)
                return JSONResponse(self._service.train(unreadable))
            return JSONResponse(run(read))

        return handled

    async def _content(self, request: HttpRequest) -> bytes:
        content = bytes(await self._bodies.read_bytes(request, str(request.client)))
        return self._decompressed(request, content)

    def _decompressed(self, request: HttpRequest, content: bytes) -> bytes:
        encoding = request.headers.get("content-encoding", "")
        return decompressed(content, encoding, max_bytes=self._settings.server.max_body_bytes)

    async def _read(self, request: HttpRequest, kind: type[requests.RequestT]) -> requests.RequestT:
        return _read_json(await self._content(request), kind)

    def _client_config(self, _: requests.ClientConfig) -> dict[str, Json]:
        """Switch off what this service lacks; a client sends one part of a training request after the other."""
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": False,
            "proto_compress_fwdbwd": self._settings.server.compressed_requests,
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": False,
            "custom_loss_server_side": False,
        }

    async def _heartbeat(self, request: HttpRequest) -> Response:
        beat = await self._read(request, requests.Heartbeat)
        if beat.session_id in self._service.clients.ended:
            return JSONResponse({"detail": self._service.clients.ended[beat.session_id]}, status_code=GONE)
        return JSONResponse(self._service.heartbeat(beat))

    async def _finish(self, request: HttpRequest) -> Response:
        finish = await self._read(request, requests.FinishSession)
        return JSONResponse(self._service.finish_session(request.path_params["id"], finish))

    async def _forward_backward(self, request: HttpRequest) -> Response:
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise RefusedError(f"forward_backward takes {PROTOBUF} only.")
        head = bytearray()

        async def receive() -> Message:
            message = await request.receive()
            head.extend(message.get("body", b"")[: MAX_HEAD_BYTES - len(head)])
            return message

        try:
            content = await self._content(HttpRequest(request.scope, receive))
            asked, num_bytes = read_forward_backward(content), len(content)
        except RefusedError as error:
            place = None if error.may_retry else self._place_of_pass(request, bytes(head))
            if place is None:
                raise
            asked, num_bytes = _failing(place, error), 0
        return JSONResponse(self._service.train(asked, num_bytes=num_bytes))

    def _place_of_pass(self, request: HttpRequest, head: bytes) -> requests.Place | None:
        """Return the position of a pass from the first bytes of its body."""
        try:
            return read_place_of_pass(self._decompressed(request, head))
        except RefusedError:
            return None

    async def _retrieve(self, request: HttpRequest) -> Response:
        request_id = (await self._read(request, requests.RetrieveFuture)).request_id
        try:
            answer = await self._service.futures.wait(request_id, timeout_s=self._settings.server.poll_s)
        except KeyError:
            answer = self._service.unknown_result(request_id)
            if answer is None:
                return JSONResponse({"detail": "its result is gone; send the request again."}, status_code=GONE)
        if answer is None:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        return Response(answer.content, media_type=answer.media_type)

    async def _telemetry(self, request: HttpRequest) -> Response:
        """Accept and drop a client's telemetry."""
        await self._content(request)
        return JSONResponse({"status": "accepted"})

    async def _health(self, request: HttpRequest) -> Response:  # noqa: ARG002
        if not self._service.has_engine:
            told = "all engines died more often than engine.restarts, so nothing is sampled. Restart the service."
            raise RefusedError(told, kind="api_error")
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, request: HttpRequest) -> Response:  # noqa: ARG002
        length = self._service.sampler.max_tokens
        models = [
            {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
            for name in self._settings.policy.all_names
        ]
        return JSONResponse({"supported_models": models})

    async def _sampler(self, request: HttpRequest) -> Response:
        client = self._service.clients.sampler(request.path_params["id"])
        shown = {"sampler_id": client.sampler_id, "base_model": client.base_model, "model_path": client.path}
        return JSONResponse(shown)

    def _weights_info(self, request: requests.WeightsPath) -> dict[str, Json]:
        saved = self._service.checkpoints.find(request.tinker_path)
        info: dict[str, Json] = {
            "base_model": saved.base_model,
            "is_lora": saved.rank > 0,
            "lora_rank": saved.rank or None,
        }
        return info | {"train_unembed": False, "train_mlp": saved.train_mlp, "train_attn": saved.train_attn}

    async def _checkpoints(self, request: HttpRequest) -> Response:
        run = request.path_params.get("run")
        if run is None:
            return _page(request, "checkpoints", [_shown(saved) for saved in reversed([*self._service.checkpoints])])
        return JSONResponse({"checkpoints": [_shown(saved) for saved in self._service.checkpoints if saved.run == run]})

    async def _run(self, request: HttpRequest) -> Response:
        return JSONResponse(self._shown_run(self._service.clients.trains(request.path_params["run"])))

    async def _runs(self, request: HttpRequest) -> Response:
        clients = sorted(self._service.clients.training.values(), key=lambda one: one.seen_at, reverse=True)
        return _page(request, "training_runs", [self._shown_run(client) for client in clients])

    def _shown_run(self, client: TrainingClient) -> dict[str, Any]:
        run = client.model_id
        saved = [one for one in self._service.checkpoints if one.run == run]
        last = {segment: next((one for one in reversed(saved) if one.segment == segment), None) for segment in SEGMENTS}
        return {
            "training_run_id": run,
            "base_model": client.entry.base_model,
            "model_owner": "local",
            "is_lora": client.entry.rank > 0,
            "corrupted": False,
            "lora_rank": client.entry.rank or None,
            "last_request_time": _time(client.seen_at),
            "last_checkpoint": None if last["weights"] is None else _shown(last["weights"]),
            "last_sampler_checkpoint": None if last["sampler_weights"] is None else _shown(last["sampler_weights"]),
            "user_metadata": _texts(client.entry.user_metadata),
        }

    async def _delete(self, request: HttpRequest) -> Response:
        self._service.checkpoints.remove(_path_of(request))
        return Response(status_code=204)

    async def _set_ttl(self, request: HttpRequest) -> Response:
        ttl_s = (await self._read(request, requests.TimeToLive)).ttl_seconds
        self._service.checkpoints.set_expiry(_path_of(request), expiry(ttl_s))
        return Response(status_code=204)

    async def _downloads(self, request: HttpRequest) -> Response:
        """Return the addresses of weights to download, which need no key until they expire."""
        expires = int(time.time()) + DOWNLOAD_S
        path = "{run}/{segment}/{name}".format(**request.path_params)
        names = [f"{path}/{file}" for file in self._service.checkpoints.downloads(f"tinker://{path}")]
        base = f"{request.base_url}{API.removeprefix('/')}/downloads"
        urls = {
            name.rpartition("/")[2]: f"{base}/{name}?expires={expires}&signature={self._signature(name, expires)}"
            for name in names
        }
        return JSONResponse({"urls": urls, "expires": _time(expires)})

    async def _download(self, request: HttpRequest) -> Response:
        name = "{run}/{segment}/{name}/{file}".format(**request.path_params)
        expires, signature = (request.query_params.get(one, "") for one in ("expires", "signature"))
        is_signed = hmac.compare_digest(self._signature(name, expires).encode(), signature.encode(errors="replace"))
        if not is_signed or int(expires) < time.time():
            raise RefusedError("the address has expired, or is not one of this service.", kind="authentication_error")
        path, _, file = name.rpartition("/")
        return FileResponse(self._service.checkpoints.downloads(f"tinker://{path}")[file])

    def _signature(self, name: str, expires: int | str) -> str:
        return hmac.new(self._key.encode(), f"{name} {expires}".encode(errors="replace"), "sha256").hexdigest()


SEGMENTS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The client's name for each kind of weights."""


def _failing(place: requests.Place, problem: RefusedError) -> ForwardBackward:
    return ForwardBackward(
        model_id=place.model_id,
        seq_id=place.seq_id,
        loss="",
        options={},
        data=(),
        forward_only=False,
        problem=problem,
    )


def _read_json(content: bytes, kind: type[requests.RequestT]) -> requests.RequestT:
    if kind is not requests.Sample and len(content) > MAX_JSON_BYTES:
        told = f"a {kind.__name__} must have at most {MAX_JSON_BYTES} bytes; found {len(content)}."
        raise RefusedError(told, kind="request_too_large")
    return requests.read_request(content, kind)


def _page(request: HttpRequest, name: str, found: list[dict[str, Any]]) -> Response:
    """Return a part of a list, as `limit` and `offset` of a request ask."""
    given = {one: request.query_params.get(one, str(default)) for one, default in (("limit", 20), ("offset", 0))}
    if not all(text.isascii() and text.isdecimal() and len(text) < 10 for text in given.values()):
        raise RefusedError(f"limit and offset must be numbers; found {given}.")
    limit, offset = int(given["limit"]), int(given["offset"])
    cursor = {"limit": limit, "offset": offset, "total_count": len(found)}
    return JSONResponse({name: found[offset : offset + limit], "cursor": cursor})


def _path_of(request: HttpRequest) -> str:
    return "tinker://{run}/{segment}/{name}".format(**request.path_params)


def _shown(saved: Saved) -> dict[str, Any]:
    _, _, name = saved.path.rpartition("/")
    return {
        "checkpoint_id": f"{saved.segment}/{name}",
        "checkpoint_type": SEGMENTS[saved.segment],
        "time": _time(saved.saved_at),
        "tinker_path": saved.path,
        "size_bytes": saved.size_bytes,
        "public": False,
        "user_metadata": saved.user_metadata,
        "expires_at": None if saved.expires_at is None else _time(saved.expires_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat()


def _texts(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    return None if values is None else {name: str(value) for name, value in values.items()}


async def _no_route(request: HttpRequest, error: HTTPException) -> Response:
    """Return the error of a route that this service does not have, by name."""
    told = f"this service does not have {request.method} {request.url.path[:120]}."
    return JSONResponse({"error": {"message": told, "type": "not_found_error"}}, status_code=error.status_code)
