"""Errors for refused requests, in the formats of OpenAI and Anthropic."""

import traceback
from collections.abc import Mapping
from typing import Literal

import structlog

from rl_core.data import Json
from rl_core.errors import RLError
from rl_rollout.rewards.outputs import cut, preview_error

RefusalKind = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
]
STATUS: Mapping[RefusalKind, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 503,
}
TOO_LONG = "context_length_exceeded"
"""Error code of a request that does not fit into the context."""


class RefusedError(RLError, ValueError):
    """The gateway refuses a request; the client receives the message."""

    def __init__(
        self,
        message: str,
        *,
        kind: RefusalKind = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """Set the message and the fields of the error response.

        Args:
            message: What is wrong and what to do.
            kind: Error type, in the names that both providers use.
            param: Field of the request that caused the error.
            code: Error code, which agents and SDKs recognize.
        """
        super().__init__(message)
        self.kind, self.param, self.code = kind, param, code

    @property
    def status(self) -> int:
        """HTTP status of the response."""
        return STATUS[self.kind]

    @property
    def may_retry(self) -> bool:
        """True if the same request may succeed later; reported to the SDKs, which by default retry every 429."""
        return self.kind in ("api_error", "rate_limit_error")

    def as_openai(self) -> dict[str, Json]:
        """Return the body of an OpenAI error."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def as_anthropic(self) -> dict[str, Json]:
        """Return the body of an Anthropic error, whose helpers look for a code in the details."""
        details: dict[str, Json] = {} if self.code is None else {"details": {"error_code": self.code}}
        return {"type": "error", "error": {"type": self.kind, "message": str(self), **details}}


def refused_field(name: str, found: object, expected: str) -> RefusedError:
    """Return the error for an invalid field, with the expected and the found value."""
    return RefusedError(f"{name} must be {expected}; found {brief(found)}.", param=name)


def brief(value: object) -> str:
    """Return a value as text that is short enough for a message."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


log = structlog.get_logger(__name__)

MAX_TRACEBACK_CHARS = 16_384


class FaultLog:
    """Logs one line per fault, with a traceback only for the first fault at each place in the code.

    Tracebacks never contain values of variables, which include session keys.
    """

    def __init__(self) -> None:
        """Start without known faults."""
        self._known: set[tuple[type[Exception], str, int | None]] = set()

    def note(self, event: str, error: Exception, **about: str) -> None:
        """Log a caught error.

        Args:
            event: Name of the log event.
            error: The error.
            about: Further fields of the event.
        """
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        place = type(error), innermost.filename, innermost.lineno
        if place not in self._known:
            self._known.add(place)
            about["stack"] = cut("".join(traceback.format_exception(error)), max_characters=MAX_TRACEBACK_CHARS)
        log.error(event, error=preview_error(error), **about)
