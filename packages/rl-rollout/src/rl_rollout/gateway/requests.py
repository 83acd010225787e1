"""HTTP requests to the gateway: their bodies within bounds, their keys, and errors in the words of their API."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from rl_core.data import Json
from rl_core.errors import DataError
from rl_rollout.gateway.refusals import RefusedError

log = structlog.get_logger(__name__)

Api = Literal["openai", "anthropic"]
Handler = Callable[[Request], Awaitable[Response]]
ResultT = TypeVar("ResultT")
CLIENT_GONE = 499


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads an answer."""


async def read_json(request: Request, *, max_bytes: int, timeout_s: float) -> dict[str, Json]:
    """The JSON object in a request's body.

    Raises:
        RefusedError: It is too large, too slow, or no JSON object.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise RefusedError(f"the body must have at most {max_bytes} bytes.", kind="request_too_large")
                parts.append(part)
    except TimeoutError:
        raise RefusedError(f"the body took longer than {timeout_s:g} s.") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    try:
        body = msgspec.json.decode(b"".join(parts))
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RefusedError(f"the body must be JSON ({error}).") from None
    if not isinstance(body, dict):
        raise RefusedError(f"the body must be a JSON object; found {type(body).__name__}.")
    return body


def secret_of(request: Request) -> str:
    """The key that a request shows, as a bearer token or as x-api-key; empty where it shows none."""
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


def in_words_of(api: Api, handler: Handler) -> Handler:
    """A handler whose refusals become the errors of an API, and whose faults tell a client nothing of us."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedError as error:
            return refusal(error, api)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except DataError as error:
            return refusal(RefusedError(str(error)), api)
        except Exception:
            log.exception("gateway_request_failed", path=request.url.path)
            return refusal(RefusedError("the gateway failed; its log says why.", kind="api_error"), api)

    return handle


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
