"""200 sessions whose agents are killed at random: each answer trains at most once, and no process is left."""

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import agent_program
import pytest
from agent_program import TRAITS, processes_with, write_agent
from chat_model import chat_prompt, encode, make_tokenizer

from rl_rollout import RewardScorer, Rollout, SamplingParams, quick
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.loops import resolve_loop

NUM_PROMPTS, GROUP_SIZE = 25, 8

# Several turns, cut histories, retries, a child that also sends requests, and a log of every received answer.
AGENT = """
import random, subprocess
draw = random.Random(int.from_bytes(os.urandom(8), "little"))
def noted(*said):
    answer = ask(*said)
    with open(os.environ["LOG"], "a") as log:
        log.write(answer + "|" + "".join(said[-2:-1]) + "\\n")
    return answer
said = [str(draw.random())]
if draw.random() < 0.2 and len(sys.argv) < 2:
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=draw.random() < 0.5)
for turn in range(draw.randrange(2, 8)):
    answer = noted(*said)
    if draw.random() < 0.2:
        answer = noted(*said)
    said += [answer, "more"]
    if draw.random() < 0.1:
        said = said[:1]
    time.sleep(draw.random() * 0.1)
if len(sys.argv) > 1:
    time.sleep(1000)
"""


async def kill_now_and_then(mark, draw):
    """Kill random processes of the agents until cancelled; return the number of kills."""
    killed = 0
    try:
        while True:
            await asyncio.sleep(draw.random() * 0.2)
            if found := await asyncio.to_thread(processes_with, mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(found), signal.SIGKILL)
                    killed += 1
    except asyncio.CancelledError:
        return killed


@pytest.mark.soak
def test_agents_that_are_killed_keep_their_traces_and_nothing_trains_twice(tmp_path, seed):
    tokenizer, draw = make_tokenizer(), random.Random(seed)
    mark, log = f"MARK_{os.urandom(8).hex()}", tmp_path / "answers.txt"
    log.touch()
    told = []

    async def say(request, index):
        told.append(f"answer {len(told)}.")
        text = told[-1]
        await asyncio.sleep(draw.random() * 0.05)
        return encode(tokenizer, f"{text}<|im_end|>").tolist()

    async def everything():
        engine = ScriptedEngine(say, end_token_ids=[tokenizer.eos_token_id], traits=TRAITS)
        await engine.start()
        options = {"max_concurrent": 16, "time_limit_s": 120, "env": {mark: "1", "LOG": str(log)}}
        loop = resolve_loop("agent", {"command": write_agent(tmp_path, AGENT), **options})
        scorer = RewardScorer(quick(lambda given: float(given.agent.exit_code == 0)))
        rollout = Rollout(engine, loop, scorer=scorer, decode=tokenizer.decode, tokenizer=tokenizer)
        prompts = [chat_prompt(tokenizer, "go", uid=f"p{number}") for number in range(NUM_PROMPTS)]
        killing = asyncio.create_task(kill_now_and_then(mark, draw))
        groups = await rollout.run(prompts, num_sessions=GROUP_SIZE, sampling=SamplingParams(max_tokens=99))
        killing.cancel()
        rollout.close()
        return groups, await killing

    groups, num_killed = asyncio.run(everything())
    sessions = [session for group in groups for session in group.sessions]
    assert len(sessions) == NUM_PROMPTS * GROUP_SIZE
    assert processes_with(mark) == []
    assert num_killed >= 20
    assert sum(group.num_audit_failures for group in groups) == 0
    for session in sessions:
        if session.failure is not None:
            assert re.match(r"the agent received no response from the policy: it exited with code -9", session.failure)
            assert session.trajectories == ()
    rows = [row for session in sessions for row in session.trajectories]
    trained = "".join(tokenizer.decode([row.input_ids[row.loss_mask] for row in rows], skip_special_tokens=False))
    times = Counter(re.findall(r"answer \d+\.", trained))
    assert trained == "".join(f"{one}<|im_end|>" for one in re.findall(r"answer \d+\.", trained))
    assert max(times.values()) == 1
    arrived, gone_on_from = zip(*(line.split("|") for line in log.read_text().splitlines()), strict=True)
    assert {*gone_on_from} - {*times} <= {""}
    num_repeated = sum(row.extras.get("gateway", {}).get("repeated", 0) for row in rows)
    assert len({*arrived} - {*times}) <= num_repeated  # only one of several answers to one request trains
    assert {session.trajectories[-1].extras["exit_code"] for session in sessions if session.trajectories} >= {0, -9}


RUN = """
import sys
sys.path.insert(0, {support!r})
from agent_program import run_agent
run_agent({command!r}, num_sessions=4, env={{{mark!r}: "1"}}, say=lambda heard: "one")
"""


@pytest.mark.soak
def test_no_agent_outlives_a_run_that_is_killed(tmp_path):
    mark, support = f"MARK_{os.urandom(8).hex()}", str(Path(agent_program.__file__).parent)
    source = """
    import subprocess
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    ask("a")
    open(sys.argv[1], "a").write("asked ")
    time.sleep(1000)
    """
    command = [*write_agent(tmp_path, source), str(tmp_path / "asked")]
    program = RUN.format(support=support, command=command, mark=mark)
    run = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while not (tmp_path / "asked").exists() or (tmp_path / "asked").read_text().count("asked") < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(processes_with(mark)) == 8
    run.kill()
    run.wait()
    while processes_with(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)
