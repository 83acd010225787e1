"""HTTP requests to the gateway: bodies of limited size, keys, and errors in the format of the API."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from rl_core.data import Json
from rl_core.errors import DataError
from rl_rollout.gateway.refusals import FaultLog, RefusedError

Api = Literal["openai", "anthropic"]
Handler = Callable[[Request], Awaitable[Response]]
ResultT = TypeVar("ResultT")
CLIENT_GONE = 499


class BodyReader:
    """Reads request bodies, with limits per request, per session and for all sessions together."""

    def __init__(self, *, max_bytes: int, timeout_s: float) -> None:
        """Set the maximum size of a body in bytes and the maximum time to receive it in seconds."""
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._held: Counter[str] = Counter()

    async def read(self, request: Request, reader: str = "") -> dict[str, Json]:
        """Read the JSON object in a request's body; see `read_bytes`.

        Raises:
            RefusedError: The body is not a JSON object.
        """
        read = await self.read_bytes(request, reader)
        try:
            body = msgspec.json.decode(read)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise RefusedError(f"the body must be JSON ({error}).") from None
        if not isinstance(body, dict):
            raise RefusedError(f"the body must be a JSON object; found {type(body).__name__}.")
        return body

    async def read_bytes(self, request: Request, reader: str = "") -> bytes | bytearray:
        """Read a request's body. Bodies with the same `reader` share a limit.

        Raises:
            RefusedError: The body is too large or too slow, or too many bodies are being read.
            ClientDisconnect: The client has closed its connection.
        """
        read = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in request.stream():
                    read += part
                    self._held[reader] += len(part)
                    self._check(len(read), reader)
        except TimeoutError:
            raise RefusedError(f"the body took longer than {self._timeout_s:g} s to arrive.") from None
        finally:
            self._held[reader] -= len(read)
            if not self._held[reader]:
                del self._held[reader]
        return read

    def _check(self, size: int, reader: str) -> None:
        if size > self._max_bytes:
            raise RefusedError(f"the body must have at most {self._max_bytes} bytes.", kind="request_too_large")
        most = {"this session": 2, "all sessions": 32}
        held = {"this session": self._held[reader], "all sessions": self._held.total()}
        for whose, number in most.items():
            if held[whose] > number * self._max_bytes:
                raise RefusedError(
                    f"{held[whose]} bytes of {whose} are being read, above the limit. Retry later.",
                    kind="rate_limit_error",
                )


def secret_of(request: Request) -> str:
    """Return the key in a request's path, bearer token or x-api-key header; empty if there is none."""
    if "key" in request.path_params:  # verifiers has one environment variable for the keys of all sessions
        return str(request.path_params["key"])
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key", "")


async def unless_gone(request: Request, call: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await a call, and cancel it if the client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
    """
    task = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()


class ErrorsInFormat:
    """Serves a handler: refusals are sent as errors of the API, other errors only without details."""

    def __init__(self, api: Api, handler: Handler) -> None:
        """Serve a handler. Contexts entered in `request.state.stack` end once its response is sent."""
        self._api, self._handler = api, handler
        self._faults = FaultLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""
        request, has_begun = Request(scope, receive), False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with AsyncExitStack() as request.state.stack:
                response = await self._handler(request)
                await response(scope, receive, sending)
        except ClientDisconnect:
            if not has_begun:
                await Response(status_code=CLIENT_GONE)(scope, receive, send)
        except Exception as error:
            refused = self._refused(error, request)
            if not has_begun:  # otherwise the server closes the connection, as the response is incomplete
                await refusal(refused, request, self._api)(scope, receive, send)

    def _refused(self, error: Exception, request: Request) -> RefusedError:
        is_sampled = getattr(request.state, "is_sampled", False)  # what fails afterwards is no fault of the client
        match error:
            case RefusedError():
                return error
            case DataError() if not is_sampled:
                return RefusedError(str(error))
            case RecursionError() if not is_sampled:
                return RefusedError("the body is nested too deeply. Reduce its nesting.")
        route = getattr(request.scope.get("route"), "path", "")  # the actual path may contain a session's key
        self._faults.note("gateway_request_failed", error, route=route)
        if (session := getattr(request.state, "session", None)) is not None:
            session.note_own_fault(error)
        return RefusedError("the gateway failed; its log has the reason.", kind="api_error")


def error_body(error: RefusedError, request: Request, api: Api) -> dict[str, Json]:
    """Return an error in the form of an API: Anthropic's for its clients, also at paths that both APIs have."""
    is_anthropic = api == "anthropic" or "anthropic-version" in request.headers
    return error.as_anthropic() if is_anthropic else error.as_openai()


def refusal(error: RefusedError, request: Request, api: Api) -> Response:
    """Return the error response, with a header that tells the SDKs whether to retry.

    It closes the connection; otherwise the server would read the rest of a possibly endless body.
    """
    headers = {"x-should-retry": "true" if error.may_retry else "false", "connection": "close"}
    return JSONResponse(error_body(error, request, api), status_code=error.status, headers=headers)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
