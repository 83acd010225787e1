"""The gateway example for verl, with a stand-in for verl. The example for TRL needs TRL; see its README."""

import asyncio
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from chat_model import encode, make_tokenizer

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gateway"


class LoopBase:
    """Stand-in for verl's AgentLoopBase (0.7, commit 0003ed8), with the attributes that `run` reads."""

    def __init__(self, trainer_config, server_manager, tokenizer, processor):
        self.config, self.server_manager = trainer_config.config, server_manager
        self.tokenizer, self.processor = tokenizer, processor


@dataclass(kw_only=True)
class LoopOutput:
    """Stand-in for verl's AgentLoopOutput, with its fields and types."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: object
    extra_fields: dict = field(default_factory=dict)

    def __post_init__(self):
        for row in (self.prompt_ids, self.response_ids, self.response_mask):
            assert {type(value) for value in row} == {int}
        assert {type(value) for value in self.response_logprobs} == {float}


class Servers:
    """Stand-in for verl's AsyncLLMServerManager: one sample per call."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        assert set(sampling_params) == {"temperature", "top_p", "logprobs", "stop_token_ids"}
        self.calls.append((request_id, prompt_ids))
        ids = encode(self.tokenizer, f"{len(self.calls)}2<|im_end|>").tolist()
        return SimpleNamespace(token_ids=ids, log_probs=[-0.5] * len(ids))


@pytest.fixture
def example(monkeypatch):
    """Import the example's module with a stand-in for verl."""
    names = "verl", "verl.experimental", "verl.experimental.agent_loop", "verl.experimental.agent_loop.agent_loop"
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stand_in = sys.modules[names[-1]]
    stand_in.AgentLoopBase, stand_in.AgentLoopOutput, stand_in.AgentLoopMetrics = LoopBase, LoopOutput, SimpleNamespace
    stand_in.register = lambda _name: lambda kind: kind
    monkeypatch.syspath_prepend(EXAMPLE)
    for name in ("agent", "verl_agent_loop"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("verl_agent_loop")
    for name in ("agent", "verl_agent_loop"):
        sys.modules.pop(name, None)


def test_verls_agent_loop_gives_exactly_what_its_servers_sampled(example):
    tokenizer = make_tokenizer()
    servers = Servers(tokenizer)
    rollout = SimpleNamespace(prompt_length=200, response_length=200)
    config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))

    async def batch():
        loop = example.GatewayAgentLoop(config, servers, tokenizer.wrapped, None)
        prompt = {"raw_prompt": [{"role": "user", "content": "go"}], "uid": "p"}
        outputs = [await loop.run({"temperature": 1.0, "top_p": 1.0}, **prompt) for _ in range(2)]
        (gateway,) = [await task for task in example.GatewayAgentLoop._gateways.values()]
        await gateway.close()
        return outputs

    outputs = asyncio.run(asyncio.wait_for(batch(), 60))
    assert len({request_id for request_id, _ in servers.calls}) == 2  # each session stays with one server
    for number, output in enumerate(outputs):
        assert output.prompt_ids == servers.calls[2 * number][1]
        ids = output.prompt_ids + output.response_ids
        assert ids[: len(servers.calls[2 * number + 1][1])] == servers.calls[2 * number + 1][1]
        trained = [one for one, trains in zip(output.response_ids, output.response_mask, strict=True) if trains]
        said = "".join(f"{2 * number + turn}2<|im_end|>" for turn in (1, 2))
        assert tokenizer.decode([trained], skip_special_tokens=False) == [said]
        assert sum(output.response_logprobs) == -0.5 * len(trained)
        assert (output.reward_score, output.num_turns) == (1.0, 4)
