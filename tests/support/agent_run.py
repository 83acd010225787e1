"""The tiny run with agents, which ask for two turns; some ask for a third turn that branches off."""

from pathlib import Path
from typing import Literal

from agent_program import write_agent
from chat_model import make_tokenizer
from tiny_run import REWARD, TinyRun, make_tiny_policy, make_tiny_run

PROMPTS_PER_STEP = 2
GROUP_SIZE = 3

TALK = """
def talk(question, ask):
    with open({ran!r}, "a") as ran:
        ran.write(question + "\\n")
    first = ask(question)
    ask(question, first, "sure?")
    if len(first) % 2:
        ask(question, first, "no")
"""

FUNCTION = """
import asyncio
import json
import urllib.request


async def agent(task):
    def ask(*said):
        messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * len(said), said)]
        body = json.dumps({"model": "any", "messages": messages}).encode()
        headers = {"authorization": "Bearer " + task.api_key, "content-type": "application/json"}
        asked = urllib.request.Request(task.base_url + "/v1/chat/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=50) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    await asyncio.to_thread(talk, task.text, ask)
"""


def make_agent_run(folder: Path, *, kind: Literal["command", "function"] = "function") -> TinyRun:
    """Write the inputs of a run whose sessions have two or three turns, and one or two trajectories.

    Args:
        folder: Folder of the inputs.
        kind: Run the agent as a function in the trainer, or as a separate program.
    """
    folder.mkdir(exist_ok=True)
    run = make_tiny_run(folder)
    make_tiny_policy(folder / "policy", make_tokenizer().wrapped, vocab_size=104, max_positions=256)
    talk = TALK.format(ran=str(folder / "ran.txt"))
    if kind == "command":
        command = write_agent(folder, f"{talk}talk(os.environ['RL_PROMPT'], ask)")
        option = f"command = {command!r}"
    else:
        (folder / "agent.py").write_text(talk + FUNCTION)
        option = f'function = "{folder}/agent.py:agent"'
    (folder / "reward.py").write_text(REWARD.replace(REWARD.splitlines()[-1], "    return sum(map(ord, text)) % 5 / 4"))
    run.replace_in_settings(
        {
            f'validation = "{folder}/validation.parquet"\n': "",
            f'test = "{folder}/test.parquet"\n': "",
            "max_tokens = 8\n\n[reward]": "max_tokens = 64\n\n[reward]",
            "group_size = 4": f'group_size = {GROUP_SIZE}\nloop = "agent"\nloop_options = {{ {option} }}',
            "prompts_per_step = 4": f"prompts_per_step = {PROMPTS_PER_STEP}\nrescored_share = 1.0",
            "max_num_seqs = 64": "max_num_seqs = 64\nmax_model_len = 128",
            "validate_every = 2": "validate_every = 0",
        }
    )
    return run


def questions(run: TinyRun) -> list[str]:
    """Return the question of each started agent, in order."""
    path = run.folder / "ran.txt"
    return path.read_text().splitlines() if path.exists() else []
