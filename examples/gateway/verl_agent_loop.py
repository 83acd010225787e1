"""An agent loop of verl 0.9 whose agent is any program that uses OpenAI's API; verl's own servers sample.

verl finds it through `agent_loop_config_path`: `[{name: gateway, _target_: verl_agent_loop.GatewayAgentLoop}]`.
"""

import asyncio
from collections.abc import Collection
from typing import Any

import numpy as np
from agent import run_agent
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from rl_rollout import GenerateRequest, Generation, PromptTokenizer, SamplingParams
from rl_rollout.engines import EngineTraits
from rl_rollout.gateway import Gateway


class VerlServers:
    """verl's servers as the gateway's engine; verl starts them and sends them new weights."""

    def __init__(self, servers: Any, *, max_model_len: int, vocab_size: int) -> None:
        """Wrap verl's `server_manager`."""
        self._servers = servers
        self.traits = EngineTraits(name="verl", max_model_len=max_model_len, vocab_size=vocab_size)

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """Send one request per sample; all turns of a session go to the server that has its prefix."""
        session = str(request.request_id).partition("/")[0]
        return list(await asyncio.gather(*(self._sample(request, one, session) for one in request.samplings)))

    async def _sample(self, request: GenerateRequest, sampling: SamplingParams, session: str) -> Generation:
        stops = list(sampling.stop_token_ids)
        drawing = {"temperature": sampling.temperature, "top_p": sampling.top_p, "logprobs": True}
        output = await self._servers.generate(
            session, prompt_ids=request.input_ids.tolist(), sampling_params={**drawing, "stop_token_ids": stops}
        )
        ids = np.array(output.token_ids[: sampling.max_tokens], np.int32)
        return Generation(
            token_ids=ids,
            logprobs=np.array(output.log_probs[: len(ids)], np.float32),
            policy_versions=np.zeros(len(ids), np.int32),  # verl tracks them
            finish_reason="stop" if len(ids) and int(ids[-1]) in stops else "length",
        )

    async def abort(self, request_ids: Collection[str] | None) -> None:
        """Do nothing: verl lets running requests finish."""


@register("gateway")
class GatewayAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """One session of the gateway; all loops of a worker share a gateway."""

    _gateways: "dict[int, asyncio.Task[Gateway]]" = {}  # noqa: RUF012 - shared by the worker's loops

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run the agent on a prompt and return exactly the sampled tokens."""
        known, servers = self._gateways, id(self.server_manager)
        if servers not in known:
            known[servers] = asyncio.ensure_future(self._start())
        gateway = await known[servers]
        rollout = self.config.actor_rollout_ref.rollout
        drawing = {name: sampling_params[name] for name in ("temperature", "top_p")}
        sampling = SamplingParams(max_tokens=rollout.response_length, **drawing)
        session = gateway.open(str(kwargs.get("uid", "prompt")), sampling=lambda _turn: sampling)
        session.set_reward(await run_agent(f"{gateway.url}/v1", session.key, list(kwargs["raw_prompt"])))
        result = await gateway.finish(session)
        if result.failure is not None:  # a failed session must not count as a reward of 0
            raise RuntimeError(f"session {session.session_id} failed: {result.failure}")
        row = max(result.trajectories, key=lambda one: int(one.loss_mask.sum()))  # this interface expects one row
        start = row.num_prompt_tokens
        return AgentLoopOutput(
            prompt_ids=row.input_ids[:start].tolist(),
            response_ids=row.input_ids[start:].tolist(),
            response_mask=row.loss_mask[start:].astype(int).tolist(),
            response_logprobs=row.rollout_logprobs[start:].tolist(),
            reward_score=row.reward,
            num_turns=2 * session.counts["turns"],
            metrics=AgentLoopMetrics(),
        )

    async def _start(self) -> Gateway:
        rollout = self.config.actor_rollout_ref.rollout
        longest = rollout.prompt_length + rollout.response_length
        engine = VerlServers(self.server_manager, max_model_len=longest, vocab_size=len(self.tokenizer))
        gateway = Gateway(engine, PromptTokenizer(self.tokenizer), sampling=SamplingParams(max_tokens=longest))
        await gateway.start()
        return gateway
