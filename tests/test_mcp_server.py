"""A scripted model, then a tiny real one, uses a real MCP server from PyPI over three turns."""

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_model import Speaker, chat_prompt, in_turn, make_tokenizer, run_loop
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_rollout import RewardScorer, Rollout, SamplingParams, quick, resolve_loop
from rl_rollout.engines.transformers import TransformersEngine

pytest.importorskip("mcp_server_time", reason="locks/cpu.txt brings mcp-server-time")

END = "<|im_end|>"
SERVER = {
    "command": [sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"],
    "env": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
}
EVERY_TURN_CALLS = '''
from rl_rollout.tools import ToolCall
from rl_rollout.tools.parsers import ParsedTurn


class EveryTurnCalls:
    """Whatever was said, the time is asked for: random weights write no calls."""

    stop_tokens = ()

    def parse(self, text, *, parameters):
        arguments = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
        return ParsedTurn(calls=(ToolCall(name="convert_time", arguments=arguments),))
'''


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_scripted_model_asks_the_server_over_three_turns():
    tokenizer = make_tokenizer()
    turns = [
        f"{call('convert_time', source_timezone='UTC', time='12:00', target_timezone='Asia/Tokyo')}{END}",
        f"{call('get_current_time', timezone='Asia/Tokyo')}{call('get_current_time', timezone='Mars/Base')}{END}",
        f"It is nine in the evening.{END}",
    ]
    speaker = Speaker(tokenizer, in_turn(*turns))
    loop = resolve_loop("tools", {"mcp_servers": {"time": SERVER}})
    prompt = chat_prompt(tokenizer, "What time is it in Tokyo when it is noon in UTC?")
    (group,) = run_loop(loop, speaker, [prompt], num_sessions=2, sampling=SamplingParams(max_tokens=3000))
    assert (group.failures, group.num_audited, group.num_audit_failures) == ((), 2, 0)
    for trajectory in group.trajectories:
        assert trajectory.extras == {"ended_by": "answer", "num_turns": 3, "tool_calls": {"ok": 2, "raised": 1}}
        trained, everything = tokenizer.decode(
            [trajectory.input_ids[trajectory.loss_mask], trajectory.input_ids], skip_special_tokens=False
        )
        assert trained == "".join(turns)
        assert "T21:00:00+09:00" in everything
        assert "get_current_time: Get current time" in everything
        assert "Mars/Base" in everything


def save_model(folder: Path) -> Path:
    """Write a random model for the vocabulary of `make_tokenizer`, with room for three turns of single characters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_tiny_model_runs_the_same_loop(tmp_path: Path):
    parser = tmp_path / "every_turn.py"
    parser.write_text(EVERY_TURN_CALLS)
    tokenizer = make_tokenizer()
    engine = TransformersEngine(save_model(tmp_path / "model"))
    options = {
        "mcp_servers": {"time": SERVER},
        "parser": f"{parser}:EveryTurnCalls",
        "limits": {"max_turns": 3, "max_turn_tokens": 30},
        "calls": {"max_result_chars": 40},
    }
    rollout = Rollout(
        engine,
        resolve_loop("tools", options),
        scorer=RewardScorer(quick(lambda given: float(len(given.response_ids)))),
        decode=tokenizer.decode,
        tokenizer=tokenizer,
    )

    async def everything():
        await engine.start()
        try:
            # half of the vocabulary ends a turn, because a random model rarely samples the end token
            stops = tuple(range(0, engine.traits.vocab_size, 2))
            sampling = SamplingParams(max_tokens=engine.traits.max_model_len, stop_token_ids=stops)
            return await rollout.run([chat_prompt(tokenizer, "?")], num_sessions=4, sampling=sampling, seed=1)
        finally:
            rollout.close()
            await engine.close()

    (group,) = asyncio.run(everything())
    assert (group.failures, group.num_audited, group.num_audit_failures) == ((), 4, 0)
    called = [trajectory.extras["tool_calls"].get("truncated", 0) for trajectory in group.trajectories]
    assert max(called) == 2
    for trajectory in group.trajectories:
        assert trajectory.reward == np.count_nonzero(trajectory.loss_mask)
        assert (trajectory.rollout_logprobs[trajectory.loss_mask] < 0).all()
