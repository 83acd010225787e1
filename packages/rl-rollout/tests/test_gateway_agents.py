"""Unmodified agents from PyPI and npm, as processes in their own environments, with a script and with a tiny policy."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import encode, make_tokenizer
from gateway_site import gateway_site

from rl_rollout.engines.protocol import EngineTraits, SamplingParams
from rl_rollout.engines.scripted import ScriptedEngine

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif("AGENTS_PYTHON" not in os.environ, reason="`nox -s agents` makes their environment"),
]
PROGRAMS = Path(__file__).resolve().parents[3] / "tests" / "support" / "pypi_agents"
AIDER = (
    "--model openai/policy --no-git --yes-always --no-show-model-warnings --no-check-update --analytics-disable "
    "--edit-format whole --no-stream"
)
CODEX = (
    "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy",
    "-c", 'web_search="disabled"', "-c", 'model_provider="gateway"', "-c",
    'model_providers.gateway={{name="gateway",base_url="{url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}',
)  # fmt: skip
MINI = ("-m", "minisweagent.run.mini", "-t", "1+2?", "-y", "--exit-immediately", "-o", "ran.json", "-m")
DEADLINE_S = 300.0
MAX_LENGTH = 16_384
SCRIPTED_LENGTH = 1 << 18


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


SUM = call("add", left=1, right=2)
AGENTS = {
    "mini-swe-agent": [*MINI, "openai/policy"],
    "claude-agent-sdk": ["claude.py", "1+2?"],
    "mini-swe-agent, Messages": [*MINI, "anthropic/policy"],
    "smolagents, code": ["smol.py", "code", "1+2?"],
    "smolagents, calls": ["smol.py", "tools", "1+2?"],
    "openai-agents": ["openai_sdk.py", "chat", "1+2?"],
    "openai-agents, Responses": ["openai_sdk.py", "responses", "1+2?"],
    "pydantic-ai": ["pydantic_agent.py", "openai", "1+2?"],
    "pydantic-ai, Messages": ["pydantic_agent.py", "anthropic", "1+2?"],
    "Anthropic's tool_runner": ["tool_runner.py", "1+2?"],
    "LangChain, LangGraph": ["langchain_agent.py", "1+2?"],
    "LangChain, structured output": ["structured.py", "langchain", "1+2?"],
    "Agno": ["agno_agent.py", "1+2?"],
    "AG2": ["ag2_agent.py", "1+2?"],
    "AutoGen": ["autogen_agent.py", "1+2?"],
    "Haystack": ["haystack_agent.py", "1+2?"],
    "DSPy": ["dspy_program.py", "1+2?"],
    "Outlines": ["structured.py", "outlines", "1+2?"],
    "Instructor": ["structured.py", "instructor", "1+2?"],
    "CrewAI": ["crew.py", "1+2?"],
    "LlamaIndex": ["llama.py", "1+2?"],
    "Semantic Kernel": ["kernel.py", "1+2?"],
    "Strands": ["strands_agent.py", "1+2?"],
    "Aider": ["-m", "aider", *AIDER.split(), "--message", "1+2?"],
    "AI SDK, Messages": ["ai_sdk.mjs", "anthropic", "1+2?"],
    "AI SDK, Responses": ["ai_sdk.mjs", "openai", "1+2?"],
    "AI SDK, generateObject": ["ai_sdk.mjs", "object", "1+2?"],
    "openai for Node": ["node_sdks.mjs", "openai", "1+2?"],
    "anthropic for Node": ["node_sdks.mjs", "anthropic", "1+2?"],
    "Codex CLI": ["codex", *CODEX, "1+2?"],
    "Qwen Code": ["qwen", "--yolo", "--auth-type", "openai", "-m", "policy", "-p", "1+2?"],
}
PLACES = {
    **dict.fromkeys(("CrewAI", "Instructor", "LlamaIndex", "Semantic Kernel", "Strands"), "AGENTS_OPENAI2_PYTHON"),
    "Aider": "AGENTS_AIDER_PYTHON",
    **dict.fromkeys([name for name in AGENTS if name.startswith("AI SDK")], "AGENTS_NODE"),
    **dict.fromkeys(("openai for Node", "anthropic for Node", "Codex CLI", "Qwen Code"), "AGENTS_NODE"),
}
"""Variable with the Python, or with the folder of Node's packages, of agents that are not in the first environment."""
BASH = [
    f"I look.{call('bash', command='echo $((1+2))')}",
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
]
ADDERS = (
    "Anthropic's tool_runner", "LangChain, LangGraph", "Agno", "AG2", "AutoGen", "Haystack", "CrewAI", "LlamaIndex",
    "Semantic Kernel", "Strands", "openai for Node", "anthropic for Node",
)  # fmt: skip
PARSERS = ("LangChain, structured output", "DSPy", "Outlines", "Instructor", "AI SDK, generateObject")
ONCE = (f"<think>hm</think>I add.{SUM}", "It is 3.")
OBJECT = ('{"total": 3}',)
SHELL = {"command": "echo $((1+2))", "description": "Adds.", "is_background": False}
ADDING = [f"<think>hm</think>I add.{SUM}{SUM}", "3 and 3.", SUM, "Yes."]
HANDING_OVER = [f"I add.{SUM}{SUM}", call("transfer_to_checker"), SUM, "It is 3."]
SAYS = {
    "claude-agent-sdk": [f"<think>hm</think>I look.{call('Bash', command='echo 3')}", "It is 3."],
    "mini-swe-agent": BASH,
    "mini-swe-agent, Messages": BASH,
    "smolagents, code": ["I add.\n<code>\nx = add(1, 2)\nprint(x)\n</code>", "<code>\nfinal_answer(x)\n</code>"],
    "smolagents, calls": [SUM, call("final_answer", answer="3")],
    "openai-agents": HANDING_OVER,
    "openai-agents, Responses": HANDING_OVER,
    "pydantic-ai": ADDING,
    "pydantic-ai, Messages": ADDING,
    **dict.fromkeys(ADDERS, ONCE),
    **dict.fromkeys(PARSERS, OBJECT),
    **dict.fromkeys(("AI SDK, Messages", "AI SDK, Responses"), (*ONCE, f"Again.{SUM}{SUM}", "Yes.")),
    "Aider": ["I change it.\n\nsum.py\n```\nx = 3\n```\n"],
    "Codex CLI": [f"I look.{call('exec_command', cmd='echo $((1+2))')}", "It is 3."],
    "Qwen Code": [f"I look.{call('run_shell_command', **SHELL)}", "It is 3."],
}
FORKS = {
    "smolagents, code": ([1, 1], {"roots_assistant": 1}),  # the agent writes its calls into the response
    "smolagents, calls": ([1, 1], {"roots_assistant": 1}),
    "openai-agents, Responses": ([2, 2], {"roots_tools": 1}),
    "openai-agents": ([2, 2], {"roots_tools": 1}),  # the second agent has other tools and another system prompt
}
"""Turns of each trajectory, and additional roots; other agents have one trajectory and no additional root."""
LONG = ("Codex CLI", "Qwen Code")
"""Agents whose first prompt is longer than the tiny policy's context."""


async def run_agent(gateway: Any, session: Any, name: str, folder: Path) -> tuple[int, str]:
    """Run an agent to its end; return its exit status and output."""
    *program, last = AGENTS[name]
    program = [str(PROGRAMS / word) if word.endswith((".py", ".mjs")) else word for word in program]
    program = [word.format(url=gateway.url) if word.startswith("model_providers") else word for word in program]
    environment = {
        "AGENTS_NODE": os.environ.get("AGENTS_NODE", ""),
        "ANTHROPIC_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": gateway.url,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "HOME": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "OPENAI_API_KEY": session.key,
        "OPENAI_API_BASE": f"{gateway.url}/v1",
        "OPENAI_BASE_URL": f"{gateway.url}/v1",
        "OTEL_SDK_DISABLED": "true",
        "PATH": os.environ["PATH"],
    }
    process = await asyncio.create_subprocess_exec(
        *started(name, program),
        last,
        env=environment,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


def started(name: str, program: list[str]) -> list[str]:
    """Return the command of an agent; skip the test if its environment is missing."""
    place = PLACES.get(name, "AGENTS_PYTHON")
    if place not in os.environ:
        pytest.skip(f"{name} needs {place}, which `nox -s agents` sets; agents of Node need npm")
    if place != "AGENTS_NODE":
        return [os.environ[place], *program]
    first, *rest = program
    in_folder = Path(os.environ[place]) / "node_modules" / ".bin" / first
    return ["node", *program] if first.endswith(".mjs") else [str(in_folder), *rest]


def runs_of(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return the start and stop of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_with_a_script_trains_what_it_said_and_forks_where_it_forks(name: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    told = [encode(tokenizer, f"{text}<|im_end|>") for text in SAYS[name]]
    asked: list[np.ndarray] = []

    def say(request: Any, _index: int) -> list[int]:
        asked.append(request.input_ids)
        ids: list[int] = told[len(asked) - 1].tolist()
        return ids

    async def talk() -> None:
        traits = EngineTraits(name="scripted", max_model_len=SCRIPTED_LENGTH, vocab_size=1 << 20)
        engine = ScriptedEngine(say, end_token_ids=[tokenizer.eos_token_id], traits=traits, decode=tokenizer.decoder())
        async with gateway_site(None, engine=engine) as gateway:
            session = gateway.open("p")
            status, output = await run_agent(gateway, session, name, tmp_path)
            assert status == 0, output
            session.set_reward(1.0)
            result = await gateway.finish(session)
        assert result.failure is None
        turns, roots = FORKS.get(name, ([len(asked)], {}))
        assert [len(runs_of(row.loss_mask)) for row in result.trajectories] == turns
        assert {key: n for key, n in session.counts.items() if key.startswith("roots")} == {"roots_first": 1, **roots}
        assert session.counts["forks"] == session.counts["repeated"] == 0
        spans = [(row, *run) for row in result.trajectories for run in runs_of(row.loss_mask)]
        assert (
            len(spans) == len(asked) >= min(2, len(told))
        )  # each turn trains once, in the context that the engine was given
        for (row, start, stop), context, said in zip(spans, asked, told, strict=False):
            assert row.input_ids[:start].tolist() == context.tolist()
            assert row.input_ids[start:stop].tolist() == said[: stop - start].tolist()

    asyncio.run(asyncio.wait_for(talk(), DEADLINE_S))


@asynccontextmanager
async def tiny_policy(folder: Path, tokenizer: Any) -> AsyncIterator[Any]:
    """Start a transformers engine with random weights and the tokenizer's vocabulary size."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rl_rollout.engines.options import TransformersOptions
    from rl_rollout.engines.transformers import TransformersEngine

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=104, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=MAX_LENGTH, dtype="float32",
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer._tokenizer.save_pretrained(folder)
    engine = TransformersEngine(folder, TransformersOptions(max_model_len=MAX_LENGTH))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize("name", [name for name in AGENTS if name not in LONG])
def test_an_agent_with_a_policy_that_says_anything_ends_and_what_trains_is_exact(
    name: str, tmp_path: Path, seed: int
) -> None:
    async def talk() -> None:
        tokenizer = make_tokenizer()
        sampling = SamplingParams(max_tokens=24, seed=seed)
        async with (
            tiny_policy(tmp_path / "policy", tokenizer) as engine,
            gateway_site(None, engine=engine, sampling=sampling) as gateway,
        ):
            session = gateway.open("p")
            _, output = await run_agent(gateway, session, name, tmp_path)
            assert session.counts["turns"], output
            session.set_reward(0.0)
            result = await gateway.finish(session)
            assert result.failure is None, output  # the audit passed
            rows = result.trajectories
            trained = sum(int(row.loss_mask.sum()) for row in rows)
            assert trained <= session.counts["sampled_tokens"]
            assert session.counts["repeated"] or trained == session.counts["sampled_tokens"]
            for row, logprobs in zip(rows, await engine.score([row.input_ids for row in rows]), strict=True):
                difference = np.abs(row.rollout_logprobs - logprobs)[row.loss_mask]
                assert float(difference.max()) < 1e-4

    asyncio.run(asyncio.wait_for(talk(), DEADLINE_S))
