"""Refused requests, in the formats of both providers."""

from collections.abc import Mapping
from typing import Literal

from rl_core.data import Json
from rl_core.errors import RLError

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


class RefusedError(RLError, ValueError):
    """A request that is not served; the client gets the message."""

    def __init__(
        self,
        message: str,
        *,
        kind: RefusalKind = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """Keep what the client is told beside the message.

        Args:
            message: What is wrong and what to do.
            kind: Of error, as both providers name them.
            param: Field of the request that is at fault.
            code: OpenAI's name of the fault, which agents look for.
        """
        super().__init__(message)
        self.kind, self.param, self.code = kind, param, code

    @property
    def status(self) -> int:
        """Of the response."""
        return STATUS[self.kind]

    @property
    def may_retry(self) -> bool:
        """Whether the same request may be served later; the SDKs retry 429 by themselves unless they are told."""
        return self.kind in ("api_error", "rate_limit_error")

    def as_openai(self) -> dict[str, Json]:
        """The body of OpenAI's errors."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def as_anthropic(self) -> dict[str, Json]:
        """The body of Anthropic's errors."""
        return {"type": "error", "error": {"type": self.kind, "message": str(self)}}


def refused_field(name: str, found: object, expected: str) -> RefusedError:
    """Says which field of a request is at fault, what it must be and what it is."""
    shown = repr(found)
    return RefusedError(
        f"{name} must be {expected}; found {shown if len(shown) <= 80 else shown[:77] + '...'}.", param=name
    )
