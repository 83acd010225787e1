"""Reward from a service, which gets a POST of JSON for each response, using the httpx library."""

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, ClassVar

import numpy as np

from rl_core.data import Json, Prompt
from rl_core.errors import DataError, DeadlineError, MissingExtraError, RLError, SettingsError
from rl_core.record_fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, settings_record
from rl_core.secret_settings import check_headers, hide, redact_option
from rl_rollout.rewards.outputs import cut, preview, preview_error
from rl_rollout.rewards.protocol import RewardInput, RewardResult

SENT = tuple(one.name for one in fields(RewardInput))
DEFAULT_SENT = ("prompt_uid", "response_text", "messages", "ground_truth", "data_source", "finish_reason")
MAX_ANSWER_BYTES = 1 << 18
MAX_PAUSE_S = 30.0
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)


class RewardServiceError(RLError, ConnectionError):
    """A reward service cannot be reached, or reports that it is busy or broken."""


@settings_record
class HttpService:
    """A service that answers a POST of JSON, with retries.

    Failed connections, timeouts and the statuses 408, 429, 500, 502, 503 and 504 are retried, with pauses that double
    or that the answer's Retry-After sets, up to half a minute. Any other status fails at once.

    Attributes:
        url: http or https URL; redirects are not followed.
        timeout_s: Maximum seconds of one request.
        retries: Maximum number of requests after the first. All of them must fit in the scorer's timeout_s.
        backoff_s: Seconds before the first retry.
        headers: Headers of each request; in settings, "Bearer $NAME" inserts an environment variable.
        token_env: Environment variable whose value is sent as `Authorization: Bearer ...`, so that no setting contains
            it.
    """

    owner: ClassVar[str] = "reward 'http'"
    kind: ClassVar[str] = "reward service"
    url: str
    timeout_s: PositiveFloat = 10.0
    retries: NonNegativeInt = 3
    backoff_s: NonNegativeFloat = 0.5
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    token_env: str = ""
    client_options: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MissingExtraError: httpx is not installed.
            SettingsError: An option is invalid.
        """
        httpx = _library()
        try:
            is_url = httpx.URL(self.url).scheme in ("http", "https") and bool(httpx.URL(self.url).host)
        except httpx.InvalidURL:
            is_url = False
        if not is_url:
            raise SettingsError(f"url of {self.owner} must start with http:// or https://; found {self._shown!r}.")
        if self.token_env and self.token_env not in os.environ:
            raise SettingsError(f"token_env of {self.owner}: the environment variable {self.token_env!r} is not set.")
        check_headers(self._headers(), where=self.owner)
        # Connections are not reused: a scorer may run in one event loop after another, and be closed outside of any.
        limits = httpx.Limits(max_keepalive_connections=0)
        certificates = httpx.create_ssl_context()  # reading them takes 20 ms
        options = {"timeout": self.timeout_s, "limits": limits, "verify": certificates}
        object.__setattr__(self, "client_options", options)

    async def rehearse(self, prompt: Prompt) -> None:
        """Do nothing: the service is not called before the run."""

    async def ask(self, content: bytes) -> str:
        """Return the answer to a JSON document, without the secrets of the request.

        Raises:
            RewardServiceError: The service cannot be reached or is busy, after all retries.
            DeadlineError: The service took too long, after all retries.
            DataError: The answer is too long, or has another status.
        """
        httpx = _library()
        async with httpx.AsyncClient(headers=self._headers(), **self.client_options) as client:
            attempt = 0
            while True:
                is_last = attempt == self.retries
                pause_s = min(self.backoff_s * 2.0 ** min(attempt, 32), MAX_PAUSE_S)
                try:
                    status, headers, body = await self._post(client, content)
                except (httpx.TransportError, TimeoutError) as error:
                    if is_last:
                        raise self._no_answer(error) from error
                else:
                    if status not in RETRIED_STATUS or is_last:
                        return self._text(status, body)
                    pause_s = _retry_after_s(headers) or pause_s
                await asyncio.sleep(pause_s)
                attempt += 1

    async def _post(self, client: Any, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body. The body has a size limit, and must arrive within timeout_s."""
        async with asyncio.timeout(self.timeout_s), client.stream("POST", self.url, content=content) as response:
            body = bytearray()
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise DataError(f"{self.answerer} answered with more than {MAX_ANSWER_BYTES} bytes.")
            return response.status_code, response.headers, bytes(body)

    def _no_answer(self, error: Exception) -> RLError:
        tried = f"tried {self.retries + 1} times"
        if isinstance(error, TimeoutError | _library().TimeoutException):
            return DeadlineError(f"{self.answerer} did not answer within {self.timeout_s:g} s; {tried}.")
        return RewardServiceError(f"{self.answerer} cannot be reached ({self._hide(preview_error(error))}); {tried}.")

    def _text(self, status: int, body: bytes) -> str:
        text = self._hide(body.decode("utf-8", errors="replace"))  # a service may echo its request
        beginning = cut(text, max_characters=200)
        if status in RETRIED_STATUS:
            times = f"{self.retries + 1} times"
            raise RewardServiceError(f"{self.answerer} answered with status {status} {times}, last with {beginning!r}.")
        if status != 200:
            raise DataError(f"{self.answerer} answered with status {status}: {beginning!r}.")
        return text

    @property
    def answerer(self) -> str:
        """The service and its URL, without secrets."""
        return f"{self.kind} {self._shown}"

    @property
    def _shown(self) -> str:
        """The URL without its secrets."""
        return str(redact_option("url", self.url))

    def _hide(self, text: str) -> str:
        """Return a text without the secrets of the request."""
        return hide(text, {"url": self.url, "headers": self._headers()})

    def _headers(self) -> dict[str, str]:
        token = {"Authorization": f"Bearer {os.environ.get(self.token_env, '')}"} if self.token_env else {}
        return {"Content-Type": "application/json", **self.headers, **token}


@settings_record
class HttpReward(HttpService):
    """Asks a service, which returns a number or {"reward": ..., "components": {...}, "extras": {...}}.

    Attributes:
        send: Fields of RewardInput to send.
    """

    send: tuple[str, ...] = DEFAULT_SENT

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MissingExtraError: httpx is not installed.
            SettingsError: An option is invalid.
        """
        HttpService.__post_init__(self)
        for name in sorted({*self.send} - {*SENT}):
            raise SettingsError(f"send of reward 'http' has {name!r}; known: {', '.join(SENT)}.")

    async def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            RewardServiceError: The service cannot be reached or is busy, after all retries.
            DeadlineError: The service took too long, after all retries.
            DataError: The answer is not a reward.
        """
        values = {name: getattr(given, name) for name in self.send}
        text = await self.ask(json.dumps(values, default=_plain).encode())
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            beginning = cut(text, max_characters=200)
            raise DataError(f"{self.answerer} answered with invalid JSON: {beginning!r}.") from error
        if not isinstance(answer, dict):
            return RewardResult(reward=answer)
        if "reward" not in answer:
            raise DataError(
                f"{self.answerer} answered without 'reward'; it has {preview(sorted(answer))}. "
                'Answer with a number, or as in {"reward": 1.0, "components": {"acc": 1.0}}.'
            )
        components, extras = answer.get("components") or {}, answer.get("extras") or {}
        if not isinstance(components, dict) or not isinstance(extras, dict):
            raise DataError(f"{self.answerer} must return components and extras as objects.")
        return RewardResult(reward=answer["reward"], components=components, extras=extras)


def _library() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingExtraError("reward 'http' needs httpx. Install rl-rollout[http] as the README says.") from error
    return httpx


def _plain(value: Any) -> Json:
    """Convert a value that JSON does not support."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise DataError(f"a {type(value).__name__} in the row cannot be sent as JSON; remove its field from `send`.")


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    seconds = headers.get("retry-after", "")
    return min(float(seconds), MAX_PAUSE_S) if re.fullmatch(r"\d{1,6}", seconds) else None
