"""An engine behind HTTP, on this machine, which answers as vLLM's /inference/v1/generate does."""

import hmac
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl_core.data import Json, Prompt
from rl_core.errors import EngineError, MissingExtraError
from rl_rollout.audit import SampledSpan
from rl_rollout.engines.protocol import GenerateRequest
from rl_rollout.loops.protocol import LoopContext

try:
    from aiohttp import web
except ImportError as error:
    raise MissingExtraError(
        "environments of verifiers need aiohttp. Install rl-rollout[verifiers] as the README says."
    ) from error

MODEL = "policy"
MAX_REQUEST_BYTES = 256 << 20


@dataclass(slots=True, kw_only=True)
class Served:
    """One session, as the endpoint knows it.

    Attributes:
        prompt: Its prompt.
        session_index: Which session of the prompt.
        context: Generates.
        spans: What was sampled for it, in order.
        generate_s: Seconds of generation.
        num_preempted: How often its requests were preempted.
        failure: What the engine said when it could not serve a request.
    """

    prompt: Prompt
    session_index: int
    context: LoopContext
    spans: list[SampledSpan] = field(default_factory=list)
    generate_s: float = 0.0
    num_preempted: int = 0
    failure: str | None = None

    async def generate(self, body: Mapping[str, Json]) -> dict[str, Json]:
        """Answer a request.

        Raises:
            EngineError: There is no room for a token, or the engine cannot serve the request.
        """
        input_ids = np.array(body["token_ids"], dtype=np.int32)
        asked = body.get("sampling_params") or {}
        turn = len(self.spans)
        own = self.context.session_sampling(self.session_index, turn=turn)
        room = self.context.engine.traits.max_model_len - len(input_ids)
        stops = dict.fromkeys((*own.stop_token_ids, *(asked.get("stop_token_ids") or ())))
        sampling = replace(
            own,
            max_tokens=max(min(own.max_tokens, asked.get("max_tokens") or room, room), 1),
            stop_token_ids=tuple(int(token) for token in stops),
        )
        request_id = f"{self.prompt.uid}/{self.session_index}"
        started_at = time.perf_counter()
        request = GenerateRequest(input_ids=input_ids, sampling=sampling, request_id=request_id)
        (generation,) = await self.context.engine.generate(request)
        self.generate_s += time.perf_counter() - started_at
        self.num_preempted += generation.num_preempted
        if generation.finish_reason == "abort" or not len(generation.token_ids):
            raise EngineError(f"the engine gave {len(generation.token_ids)} tokens: {generation.finish_reason}.")
        self.spans.append(SampledSpan.of(input_ids, generation))
        content = [
            {"token": f"token_id:{token}", "logprob": float(logprob)}
            for token, logprob in zip(generation.token_ids.tolist(), generation.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": generation.token_ids.tolist(),
            "finish_reason": generation.finish_reason,
            "logprobs": {"content": content},
        }
        return {"request_id": f"{request_id}/{turn}", "choices": [choice]}


class TokenEndpoint:
    """Serves sessions on a free port of 127.0.0.1, each under a path that nobody else can guess."""

    def __init__(self) -> None:
        """Open nothing yet."""
        self._sessions: dict[str, tuple[str, Served]] = {}
        self._num_opened = 0
        self._runner: Any = None
        self._port = 0

    async def start(self) -> None:
        """Listen."""
        application = web.Application(client_max_size=MAX_REQUEST_BYTES)
        application.router.add_get("/{session}/{token}/v1/models", self._models)
        application.router.add_post("/{session}/{token}/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Listen no longer."""
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, served: Served) -> tuple[str, str]:
        """Serve a session; gives its name, and the base URL of its own."""
        self._num_opened += 1
        name, token = f"session-{self._num_opened}", secrets.token_urlsafe(32)
        self._sessions[name] = token, served
        return name, f"http://127.0.0.1:{self._port}/{name}/{token}/v1"

    def forget(self, name: str) -> None:
        """Serve a session no longer."""
        self._sessions.pop(name, None)

    def _session_of(self, request: Any) -> Served:
        """The session whose path this is.

        Raises:
            HTTPNotFound: It has ended, or the token is not its own.
        """
        token, served = self._sessions.get(request.match_info["session"], ("", None))
        is_own = hmac.compare_digest(token.encode(), request.match_info["token"].encode(errors="replace"))
        if served is None or not is_own:
            message = {"error": {"message": "there is no such session, or it has ended"}}
            raise web.HTTPNotFound(text=json.dumps(message), content_type="application/json")
        return served

    async def _models(self, request: Any) -> Any:
        served = self._session_of(request)
        length = served.context.engine.traits.max_model_len
        return web.json_response({"data": [{"id": MODEL, "object": "model", "max_model_len": length}]})

    async def _generate(self, request: Any) -> Any:
        served = self._session_of(request)
        try:
            return web.json_response(await served.generate(await request.json()))
        except Exception as error:
            served.failure = served.failure or f"{type(error).__name__}: {error}"
            return web.json_response({"error": {"message": served.failure}}, status=400)
