"""HTTP requests to the gateway: their bodies within bounds, their keys, and errors in the words of their API."""

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
from rl_rollout.gateway.faults import FaultLog
from rl_rollout.gateway.refusals import RefusedError

Api = Literal["openai", "anthropic"]
Handler = Callable[[Request], Awaitable[Response]]
ResultT = TypeVar("ResultT")
CLIENT_GONE = 499


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads an answer."""


class BodyReader:
    """Reads bodies within bounds: of each, of those of one session at a time, and of all at a time."""

    def __init__(self, *, max_bytes: int, timeout_s: float) -> None:
        """Read none yet."""
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._held: Counter[str] = Counter()

    async def read(self, request: Request, reader: str = "") -> dict[str, Json]:
        """The JSON object in a request's body; `reader` names whose it is.

        Raises:
            RefusedError: It is too large, too slow, or no JSON object; or too much is read already.
        """
        read = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in request.stream():
                    read += part
                    self._held[reader] += len(part)
                    self._check(len(read), reader)
        except TimeoutError:
            raise RefusedError(f"the body took longer than {self._timeout_s:g} s.") from None
        except ClientDisconnect:
            raise ClientGoneError from None
        finally:
            self._held[reader] -= len(read)
            if not self._held[reader]:
                del self._held[reader]
        try:
            body = msgspec.json.decode(read)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise RefusedError(f"the body must be JSON ({error}).") from None
        if not isinstance(body, dict):
            raise RefusedError(f"the body must be a JSON object; found {type(body).__name__}.")
        return body

    def _check(self, size: int, reader: str) -> None:
        if size > self._max_bytes:
            raise RefusedError(f"the body must have at most {self._max_bytes} bytes.", kind="request_too_large")
        most = {"this session": 2, "all sessions": 32}
        held = {"this session": self._held[reader], "all sessions": self._held.total()}
        for whose, number in most.items():
            if held[whose] > number * self._max_bytes:
                raise RefusedError(
                    f"{held[whose]} bytes of {whose} are being read, the most. Wait.", kind="rate_limit_error"
                )


def secret_of(request: Request) -> str:
    """The key that a request shows, in its path, as a bearer token or as x-api-key; empty where it shows none."""
    if "key" in request.path_params:  # verifiers takes its keys from one environment variable for all sessions
        return str(request.path_params["key"])
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key", "")


async def unless_gone(request: Request, call: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What a call gives; it is cancelled when the client goes.

    Raises:
        ClientGoneError: It has gone.
    """
    task = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        gone.cancel()
        task.cancel()


class InWordsOf:
    """Serves a handler whose refusals become the errors of an API, and whose faults tell a client nothing of us."""

    def __init__(self, api: Api, handler: Handler) -> None:
        """Serve a handler; what it enters in `request.state.stack` is left once its response is sent."""
        self._api, self._handler = api, handler
        self._faults = FaultLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an application of ASGI."""
        request, has_begun = Request(scope, receive), False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with AsyncExitStack() as request.state.stack:
                response = await self._handler(request)
                await response(scope, receive, sending)
        except ClientGoneError:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
        except Exception as error:
            refused = self._refused(error, request)
            if not has_begun:  # else the server closes the connection, since the response has no end
                await refusal(refused, self._api)(scope, receive, send)

    def _refused(self, error: Exception, request: Request) -> RefusedError:
        match error:
            case RefusedError():
                return error
            case DataError():
                return RefusedError(str(error))
            case RecursionError():
                return RefusedError("the body is nested too deep. Write it flatter.")
        route = getattr(request.scope.get("route"), "path", "")  # a path may have a session's key
        self._faults.note("gateway_request_failed", error, route=route)
        return RefusedError("the gateway failed; its log says why.", kind="api_error")


def refusal(error: RefusedError, api: Api) -> Response:
    """The response that tells a client why it is refused, and the SDKs whether to try again.

    It closes the connection: the server would else go on to read and drop a body that may be endless.
    """
    body = error.as_openai() if api == "openai" else error.as_anthropic()
    headers = {"x-should-retry": "true" if error.may_retry else "false", "connection": "close"}
    return JSONResponse(body, status_code=error.status, headers=headers)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
