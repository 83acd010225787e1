"""Agents as programs that send requests with urllib, and their sessions, for tests."""

import contextlib
import textwrap
from pathlib import Path
from typing import Any

from chat_model import Speaker, chat_prompt, in_turn, make_tokenizer, run_loop

from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.loops import resolve_loop

ASK = """
import json, os, sys, time, urllib.request
def ask(*said):
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said)]
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=50) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


def write_agent(folder: Path, source: str) -> list[str]:
    path = folder / "agent.py"
    path.write_text(ASK + textwrap.dedent(source))
    return ["python", str(path)]


TRAITS = EngineTraits(name="scripted", max_model_len=4096, vocab_size=1 << 20)
SAY = in_turn("one", "two", "three")


def run_agent(
    command: list[str],
    *,
    say: Any = SAY,
    script: Any = None,
    prompt: str = "1+2?",
    num_sessions: int = 1,
    reward: Any = None,
    with_baseline: bool = False,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """Run an agent on one prompt; return its sessions and the inputs of the reward function."""
    tokenizer = make_tokenizer()
    speaker = Speaker(tokenizer, lambda heard: say(heard) + "<|im_end|>")
    if script is not None:
        speaker.engine = ScriptedEngine(script, end_token_ids=[tokenizer.eos_token_id], traits=TRAITS)
    given: list[Any] = []

    def judge(one: Any) -> Any:
        given.append(one)
        return 1.0 if reward is None else reward(one)

    loop = resolve_loop("agent", {"command": command, "time_limit_s": 60, **options})
    prompts, options = [chat_prompt(tokenizer, prompt)], {"reward": judge, "with_baseline": with_baseline}
    (group,) = run_loop(loop, speaker, prompts, num_sessions=num_sessions, **options)
    return group.sessions, given


def processes_with(mark: str) -> list[int]:
    """Return the machine's processes whose environment contains a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
