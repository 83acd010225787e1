"""Agents as programs of their own, real processes all: what they get, how they end, what trains and what is left."""

import textwrap
from pathlib import Path

from chat_model import Speaker, chat_prompt, in_turn, make_tokenizer, run_loop

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


def write_agent(folder, source):
    path = folder / "agent.py"
    path.write_text(ASK + textwrap.dedent(source))
    return ["python", str(path)]


SAY = in_turn("one", "two", "three")


def run_agent(command, *, say=SAY, prompt="1+2?", num_sessions=1, reward=None, **options):
    """The sessions of one prompt, and what the reward function was given for them."""
    tokenizer = make_tokenizer()
    speaker = Speaker(tokenizer, lambda heard: say(heard) + "<|im_end|>")
    given = []

    def judge(one):
        given.append(one)
        return 1.0 if reward is None else reward(one)

    loop = resolve_loop("agent", {"command": command, "time_limit_s": 60, **options})
    (group,) = run_loop(loop, speaker, [chat_prompt(tokenizer, prompt)], num_sessions=num_sessions, reward=judge)
    return group.sessions, given


def test_an_agent_gets_its_prompt_and_its_turns_train(tmp_path):
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "notes.txt").write_text("as it was")
    command = write_agent(
        tmp_path,
        """
        shown = json.load(open(os.environ["RL_PROMPT_FILE"]))
        assert shown["messages"] == [{"role": "user", "content": "1+2?"}] and shown["columns"] == {}
        assert os.environ["RL_PROMPT"] == sys.stdin.read() == sys.argv[1] == shown["prompt"] == "1+2?"
        assert os.environ["MY_URL"] == os.environ["ANTHROPIC_BASE_URL"] + "/v1" and "RL_SECRET" not in os.environ
        first = ask("1+2?")
        open("notes.txt", "a").write(", and " + first)
        print(ask("1+2?", first, "sure?"))
        """,
    )
    options = {"workspace": str(tmp_path / "template"), "env": {"MY_URL": "{base_url}/v1"}}
    notes = []

    def reward(one):
        notes.append(Path(one.agent.workspace, "notes.txt").read_text())
        return 0.5

    sessions, given = run_agent([*command, "{prompt}"], num_sessions=2, reward=reward, **options)
    for session in sessions:
        assert session.failure is None
        (row,) = session.trajectories
        assert row.reward == 0.5
        assert row.extras["turns"] == 2
        assert (row.extras["ended_by"], row.extras["exit_code"]) == ("exited", 0)
    assert [one.response_text for one in given] == ["two", "two"]
    assert [one.agent.stdout for one in given] == ["two\n", "two\n"]
    assert notes == ["as it was, and one"] * 2
    assert (tmp_path / "template" / "notes.txt").read_text() == "as it was"
    assert not any(Path(one.agent.workspace).exists() for one in given)
