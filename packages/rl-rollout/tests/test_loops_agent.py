"""Agents as separate programs: their inputs, their ends, the trained texts, and leftovers."""

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

import httpx
import pytest
from agent_program import processes_with, run_agent, write_agent
from chat_model import Speaker, chat_prompt, encode, make_tokenizer

from rl_core.errors import EngineError, RolloutError, SettingsError
from rl_rollout import RewardScorer, Rollout, SamplingParams, quick
from rl_rollout.loops import resolve_loop


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
        assert row.extras["gateway"]["turns"] == 2
        assert (row.extras["ended_by"], row.extras["exit_code"]) == ("exited", 0)
    assert [one.response_text for one in given] == ["two", "two"]
    assert [one.agent.stdout for one in given] == ["two\n", "two\n"]
    assert notes == ["as it was, and one"] * 2
    assert (tmp_path / "template" / "notes.txt").read_text() == "as it was"
    assert not any(Path(one.agent.workspace).exists() for one in given)


FAULTS = {
    "killed": ("ask('a'); os.kill(os.getpid(), 9)", ("exited", -9)),
    "fails": ("ask('a'); sys.exit('no way')", ("exited", 1)),
    "floods": (
        "ask('a')\nwhile True: sys.stderr.write('y' * 65536); sys.stdout.write('y' * 65536); sys.stdout.flush()",
        ("output", None),
    ),
    "hangs": ("import signal; signal.signal(15, signal.SIG_IGN); ask('a'); ask('slow')", ("wall_time", None)),
    "closes its streams": ("ask('a'); [os.close(fd) for fd in (0, 1, 2)]; ask('a'); os._exit(3)", ("exited", 3)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_agent_does_to_itself_is_rewarded_with_its_trace(tmp_path, fault):
    source, ended = FAULTS[fault]
    options = {"time_limit_s": 8.0} if ended[0] == "wall_time" else {}

    async def say(request, index):
        (heard,) = tokenizer.decode([request.input_ids])
        if "slow" in heard:
            await asyncio.Event().wait()
        return encode(tokenizer, "one<|im_end|>").tolist()

    tokenizer = make_tokenizer()
    (session,), (given,) = run_agent(write_agent(tmp_path, source), script=say, max_output_bytes=1 << 20, **options)
    assert session.failure is None
    assert (given.agent.ended, given.agent.exit_code) == ended
    assert max(len(given.agent.stdout), len(given.agent.stderr)) <= 1 << 16
    texts = tokenizer.decode([row.input_ids[row.loss_mask] for row in session.trajectories])
    assert texts == ["one"] * len(texts)
    assert session.trajectories[-1].extras["ended_by"] == ended[0]
    assert session.trajectories[-1].extras["gateway"]["agent_failed"] == (ended != ("exited", 0))


FORKS = """
import subprocess
for detached in (False, True):
    sleeper = [sys.executable, "-c", "import time, os; os.fork(); time.sleep(1000)"]
    subprocess.Popen(sleeper, start_new_session=detached, stdout=None if detached else subprocess.DEVNULL)
ask("a")
"""


def test_nothing_that_an_agent_started_outlives_it(tmp_path):
    mark = f"MARK_{os.urandom(8).hex()}"
    (session,), _ = run_agent(write_agent(tmp_path, FORKS), env={mark: "1"})
    assert session.failure is None
    assert processes_with(mark) == []


def test_a_rollout_that_is_cancelled_ends_every_agent_and_leaves_nothing(tmp_path, monkeypatch):
    mark = f"MARK_{os.urandom(8).hex()}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = write_agent(tmp_path, FORKS + "time.sleep(1000)")
    tokenizer = make_tokenizer()
    speaker = Speaker(tokenizer, lambda heard: "one<|im_end|>")

    async def cancelled():
        await speaker.engine.start()
        loop = resolve_loop("agent", {"command": command, "env": {mark: "1"}})
        scorer = RewardScorer(quick(lambda given: 1.0))
        rollout = Rollout(speaker.engine, loop, scorer=scorer, decode=tokenizer.decode, tokenizer=tokenizer)
        prompt = chat_prompt(tokenizer, "1+2?")
        running = asyncio.create_task(rollout.run([prompt], num_sessions=2, sampling=SamplingParams(max_tokens=99)))
        async with asyncio.timeout(60):
            while len(speaker.heard) < 2:
                await asyncio.sleep(0.01)
            assert len(processes_with(mark)) >= 2
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            rollout.close()
            while processes_with(mark) or list(tmp_path.glob("rl-sandbox-*")):
                await asyncio.sleep(0.01)

    asyncio.run(cancelled())


def test_what_is_not_an_agents_doing_fails_its_session(tmp_path):
    (session,), given = run_agent(["python", "-c", "import sys; sys.exit('no model given')"])
    assert session.failure == (
        "the agent received no response from the policy: it exited with code 1; its output: no model given"
    )
    says = ["python", "-c", "import os, sys; sys.exit(os.environ['TOKEN'])"]
    (session,), _ = run_agent(says, env={"TOKEN": "secret-of-a-service"})
    assert session.failure.endswith("its output: (redacted)")
    program = tmp_path / "program"
    program.write_text("no program")
    program.chmod(0o755)
    (session,), _ = run_agent([str(program)])
    assert session.failure.startswith(
        "the agent's program cannot run: the program could not be started: Exec format error"
    )
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "socket").symlink_to("nowhere")
    loop = resolve_loop("agent", {"command": ["true"], "workspace": str(tmp_path / "template")})
    shutil.rmtree(tmp_path / "template")
    with pytest.raises(RolloutError, match=r"workspace cannot be copied: cp: .*No such file"):
        asyncio.run(loop._agents._fill(tmp_path / "copy"))
    assert given == []


def test_a_workspace_may_have_anything_in_it_and_is_gone_whatever_an_agent_made_of_it(tmp_path):
    template = tmp_path / "template"
    (template / "folder").mkdir(parents=True)
    (tmp_path / "outside.txt").write_text("kept")
    (template / "link").symlink_to(tmp_path / "outside.txt")
    (template / "dangling").symlink_to("nowhere")
    os.mkfifo(template / "pipe")
    with (template / "huge").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    (template / "folder" / "program").write_text("#!/bin/sh\nexit 0\n")
    (template / "folder" / "program").chmod(0o755)
    source = """
    import stat, subprocess
    assert os.readlink("dangling") == "nowhere" and os.path.islink("link") and stat.S_ISFIFO(os.stat("pipe").st_mode)
    assert os.stat("huge").st_size == 1 << 40 and os.stat("huge").st_blocks * 512 < 1 << 20
    assert subprocess.run(["folder/program"]).returncode == 0
    ask("a")
    os.mkdir("deep")
    for number in range(300):
        os.mkdir("deep/" * 1 + "d"); os.rename("deep/d", "d"); os.rename("deep", "d/deep"); os.rename("d", "deep")
    open("folder/locked", "w").close()
    os.chmod("folder", 0o500)
    sys.exit(4)
    """
    (session,), (given,) = run_agent(write_agent(tmp_path, source), workspace=str(template))
    assert session.failure is None
    assert (given.agent.exit_code, given.agent.stderr) == (4, "")
    assert not Path(given.agent.workspace).parent.exists()
    assert (tmp_path / "outside.txt").read_text() == "kept"


def test_an_engine_that_fails_is_no_reward_unless_a_retry_made_it_good(tmp_path):
    def say(request, index):
        asked.append(request)
        if len(asked) in fails:
            raise EngineError("out of memory")
        return encode(make_tokenizer(), "one<|im_end|>").tolist()

    source = "ask('a')\ntry: ask('b')\nexcept Exception: pass\nif len(sys.argv) > 1: ask('b')\n"
    command = write_agent(tmp_path, source)
    asked, fails = [], {2}
    (session,), given = run_agent(command, script=say)
    assert "out of memory" in session.failure
    assert (len(session.trajectories), given) == (1, [])
    asked, fails = [], {2}
    (session,), given = run_agent([*command, "again"], script=say)
    assert session.failure is None
    assert len(session.trajectories) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"command": ["no-such-program-here"]}, "program 'no-such-program-here' is not on the PATH"),
        ({"command": ["python", "pyproject.toml"]}, 'Use "{cwd}/pyproject.toml"'),
        ({"command": ["true", "{promt}"]}, "Did you mean {prompt}?"),
        ({"command": ["python", "{cwd}/agnt.py"]}, "command: file "),
        ({"command": ["python", "{cwd}/own_agents.py"], "sandbox": {}}, "Add its folder to sandbox.readable"),
        ({"command": ["true"], "sandbox": {"readable": ["/nowhere"]}}, "sandbox.readable: /nowhere does not exist"),
        ({"command": ["true"], "workspace": "/nowhere"}, "workspace of an agent must be a folder; found /nowhere"),
        ({"command": []}, "an agent needs exactly one of command"),
        ({"command": ["true"], "remote": True}, "an agent needs exactly one of command"),
        ({"remote": True}, "remote agents need gateway.owner_key"),
        ({"function": "own_agents.py:plain"}, "must be an `async def`"),
        ({"command": ["true"], "time_limit_s": 0}, "time_limit_s of agent loop 'agent' must be a number above 0"),
        ({"command": ["true"], "time_limit_s": 4000}, "limits.wall_s (3600) must be at least time_limit_s (4000)"),
        ({"command": ["true"], "gateway": {"service": {"decided_by": "client"}}}, 'must be "run"'),
        ({"command": ["true"], "gateway": {"host": "192.0.2.1"}}, "cannot listen on 192.0.2.1"),
    ],
)
def test_check_refuses_what_cannot_run(options, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").touch()
    Path("own_agents.py").write_text("def plain(task): pass")
    with pytest.raises(SettingsError, match=re.escape(expected)):
        asyncio.run(resolve_loop("agent", options).check(make_tokenizer()))
    assert asyncio.run(resolve_loop("agent", {"command": ["true"]}).check(make_tokenizer())) == [
        "agent (unconfined): true",
        "the chat template joins its turns, and keeps reasoning",
    ]


OWN_AGENTS = """
import asyncio, openai
async def ask(task, text):
    async with openai.AsyncOpenAI(base_url=task.base_url + "/v1", api_key=task.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": text}]
        done = await client.chat.completions.create(model="any", messages=messages)
        return done.choices[0].message.content
async def rewards_itself(task):
    assert task.prompt.ground_truth is None and task.session_index == 0
    return {"reward": len(await ask(task, task.text)), "short": 1.0}
async def leaves_it(task):
    await ask(task, task.text)
async def raises(task):
    await ask(task, task.text)
    raise KeyError("board")
async def gives_no_number(task):
    await ask(task, task.text)
    return "good"
async def hangs(task):
    await ask(task, task.text)
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            if ENDS: raise
            ENDS.append(1)
ENDS = []
"""


@pytest.mark.parametrize(
    ("name", "reward", "failure"),
    [
        ("rewards_itself", 3.0, None),
        ("leaves_it", 1.0, None),
        ("hangs", 1.0, None),
        (
            "raises",
            None,
            r"agent 'own_agents.py:raises' raised KeyError: 'board' \(own_agents.py, line 15",
        ),
        ("gives_no_number", None, "agent 'own_agents.py:gives_no_number' returned reward = 'good'"),
    ],
)
def test_a_function_is_an_agent_too(tmp_path, name, reward, failure):
    (tmp_path / "own_agents.py").write_text(OWN_AGENTS)
    options = {"function": f"{tmp_path}/own_agents.py:{name}", "time_limit_s": 5.0 if name == "hangs" else 60}
    (session,), given = run_agent([], **options)
    assert len(session.trajectories) == 1
    assert session.trajectories[0].reward == reward
    if failure is None:
        assert session.failure is None
        assert [one.agent and one.agent.ended for one in given] == {
            "rewards_itself": [],
            "leaves_it": [None],
            "hangs": ["wall_time"],
        }[name]
    else:
        assert re.search(failure, session.failure)


def test_the_greedy_session_runs_the_same_agent_through_the_gateway(tmp_path):
    (tmp_path / "own_agents.py").write_text(OWN_AGENTS)
    tokenizer = make_tokenizer()

    def script(request, _index):
        return encode(tokenizer, "greedy<|im_end|>" if request.sampling.temperature == 0 else "one<|im_end|>").tolist()

    options = {"function": f"{tmp_path}/own_agents.py:rewards_itself", "num_sessions": 1, "with_baseline": True}
    (session,), _ = run_agent([], script=script, **options)
    (row,) = session.trajectories
    assert (session.failure, row.reward, row.reward_baseline) == (None, len("one"), len("greedy"))


OWNER = "k" * 40


def test_workers_elsewhere_claim_sessions_and_finish_them():
    async def work(url, *, finish):
        """Claim a session, send a request with its key, and finish it."""
        owner = {"authorization": f"Bearer {OWNER}"}
        async with httpx.AsyncClient(base_url=url, timeout=50) as client:
            assert (await client.post("/sessions/claim", json={})).status_code == 401
            claimed = (await client.post("/sessions/claim", json={"wait_s": 50}, headers=owner)).json()
            assert claimed["prompt"] == "1+2?"
            assert "ground_truth" not in claimed
            assert 0 < claimed["seconds_left"] <= 60
            body = {"model": "any", "messages": claimed["messages"]}
            key = {"x-api-key": claimed["key"]}
            asked = await client.post(f"{claimed['base_url']}/v1/chat/completions", json=body, headers=key)
            assert asked.status_code == 200
            path = f"/sessions/{claimed['id']}/finish"
            assert (await client.post(path, json=finish, headers=owner)).status_code == 200
            return key, body

    async def together():
        await speaker.engine.start()
        options = {"remote": True, "time_limit_s": 60, "gateway": {"owner_key": OWNER}}
        loop = resolve_loop("agent", options)
        scorer = RewardScorer(quick(lambda given: 0.25))
        rollout = Rollout(speaker.engine, loop, scorer=scorer, decode=tokenizer.decode, tokenizer=tokenizer)
        await rollout.start()
        url = loop._gateway.url
        prompt = chat_prompt(tokenizer, "1+2?")
        running = asyncio.create_task(rollout.run([prompt], num_sessions=3, sampling=SamplingParams(max_tokens=99)))
        finishes = ({"reward": 0.5}, {}, {"failure": "no browser here"})
        worked = await asyncio.gather(*(work(url, finish=finish) for finish in finishes))
        (group,) = await running
        async with httpx.AsyncClient(base_url=url) as client:
            for key, body in worked:
                assert (await client.post("/v1/chat/completions", json=body, headers=key)).status_code == 401
            owner = {"authorization": f"Bearer {OWNER}"}
            none = await client.post("/sessions/claim", json={"wait_s": 0.01}, headers=owner)
            assert none.status_code == 204
        rollout.close()
        return group

    tokenizer = make_tokenizer()
    speaker = Speaker(tokenizer, lambda heard: "one<|im_end|>")
    group = asyncio.run(together())
    assert group.failures == ("no browser here",)
    assert sorted(row.reward for row in group.trajectories) == [0.25, 0.5]


def test_what_nobody_claims_or_finishes_in_time_fails_and_its_key_dies():
    async def wait():
        await speaker.engine.start()
        loop = resolve_loop("agent", {"remote": True, "time_limit_s": 0.2, "gateway": {"owner_key": OWNER}})
        scorer = RewardScorer(quick(lambda given: 0.25))
        rollout = Rollout(speaker.engine, loop, scorer=scorer, decode=tokenizer.decode, tokenizer=tokenizer)
        await rollout.start()
        claiming = asyncio.create_task(loop._gateway.offers.claim())
        run = rollout.run([chat_prompt(tokenizer, "1+2?")], num_sessions=2, sampling=SamplingParams(max_tokens=99))
        (group,) = await run
        assert len(loop._gateway.sessions) == 0
        assert (await claiming).session.is_finished
        rollout.close()
        return group

    tokenizer = make_tokenizer()
    speaker = Speaker(tokenizer, lambda heard: "one<|im_end|>")
    assert sorted(asyncio.run(wait()).failures) == [
        "the session was not claimed by a worker within 0.2 s.",
        "the session was not finished by its worker within 0.2 s.",
    ]
