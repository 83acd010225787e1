"""An agent in a sandbox whose only network is the gateway."""

import asyncio
import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from agent_program import processes_with, run_agent, write_agent
from chat_model import make_tokenizer

from rl_core.errors import SettingsError
from rl_rollout.loops import resolve_loop
from rl_rollout.sandbox import Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(params=["namespaces", "user_namespaces"])
def level(request, monkeypatch):
    """Select an isolation level; skip the test if this machine does not permit it."""
    if request.param == "namespaces" and os.geteuid() != 0:
        pytest.skip("only root can use this level; run the tests as root")
    if request.param == "user_namespaces":
        monkeypatch.setattr("os.geteuid", lambda: 1000)  # root can use the level of ordinary users
    monkeypatch.setattr("rl_rollout.sandbox.sandbox._levels", lambda _: [request.param])
    try:
        asyncio.run(resolve_loop("agent", {"command": ["true"], "sandbox": {}}).check(make_tokenizer()))
    except SettingsError as error:
        pytest.skip(str(error))
    return request.param


PROBE = """
import socket, subprocess
def reaches(family, address):
    try:
        with socket.socket(family) as one:
            one.settimeout(3)
            one.connect(address)
        return True
    except OSError:
        return False
def reads(path):
    try:
        return bool(os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError:
        return False
def writes(path):
    try:
        open(path, "w").write("x")
        return True
    except OSError:
        return False
host, secret, outside = sys.argv[1:]
writes(outside)
found = {
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
    "answer": ask("a"),
    "host": reaches(socket.AF_INET, ("127.0.0.1", int(host))),
    "beyond": reaches(socket.AF_INET, ("192.0.2.1", 80)) or reaches(socket.AF_INET6, ("::1", int(host))),
    "vsock": reaches(40, (2, 1)),
    "abstract": reaches(socket.AF_UNIX, "\\0rl-test-" + host),
    "secret": reads(secret) or reads("/etc/passwd"),
    "outside": writes("/usr/x") or writes(sys.argv[0]),
    "workspace": reads("notes.txt") and writes("notes.txt") and writes("new.txt") and writes("/tmp/x"),
    "shell": subprocess.run(["bash", "-c", "mkdir -p a/b && cat < <(echo hi)"], capture_output=True, text=True).stdout,
}
print(json.dumps(found))
"""


def test_the_gateway_is_all_that_an_agent_reaches(tmp_path, level):
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "notes.txt").write_text("notes")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.txt").chmod(0o644)
    (tmp_path / "code").mkdir()
    command = write_agent(tmp_path / "code", PROBE)
    with socket.create_server(("127.0.0.1", 0)) as host, socket.socket(socket.AF_UNIX) as abstract:
        port = str(host.getsockname()[1])
        abstract.bind(f"\0rl-test-{port}")
        abstract.listen()
        notes = []
        (session,), (given,) = run_agent(
            [*command, port, str(tmp_path / "secret.txt"), str(tmp_path / "written.txt")],
            workspace=str(tmp_path / "template"),
            sandbox={"readable": [str(tmp_path / "code")]},
            reward=lambda given: notes.append(sorted(one.name for one in Path(given.agent.workspace).iterdir())) or 1.0,
        )
    assert session.failure is None, session.failure
    expected = {
        "answer": "one",
        **dict.fromkeys(("host", "beyond", "vsock", "abstract", "secret", "outside"), False),
        "workspace": True,
        "shell": "hi\n",
        "processes": 2,
    }
    assert given.agent.stderr == ""
    assert not (tmp_path / "written.txt").exists()
    assert json.loads(given.agent.stdout) == expected
    assert notes == [["a", "new.txt", "notes.txt"]]
    assert not Path(given.agent.workspace).exists()


def test_what_an_agent_takes_is_bounded_and_it_ends_with_all_its_processes(tmp_path, level):
    mark = f"MARK_{os.urandom(8).hex()}"
    source = """
    import subprocess
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    ask("a")
    kept = [b"x" * (1 << 20) for _ in range(400)]
    time.sleep(1000)
    """
    (tmp_path / "code").mkdir()
    options = {"env": {mark: "1"}, "sandbox": {"readable": [str(tmp_path / "code")], "memory_bytes": 200 << 20}}
    (session,), (given,) = run_agent(write_agent(tmp_path / "code", source), **options)
    assert session.failure is None
    assert given.agent.ended == "memory"
    assert processes_with(mark) == []


def test_where_no_sandbox_works_the_option_is_refused_with_the_reasons(monkeypatch):
    async def fails(self, level):
        return f"{level} is not permitted"

    monkeypatch.setattr(Sandbox, "_try", fails)
    loop = resolve_loop("agent", {"command": ["true"], "sandbox": {}})
    with pytest.raises(SettingsError, match="user_namespaces: user_namespaces is not permitted") as caught:
        asyncio.run(loop.check(make_tokenizer()))
    assert "other_user" not in str(caught.value)


def test_a_program_that_the_sandbox_cannot_start_fails_the_session(level):
    (session,), given = run_agent(["/nowhere/{prompt}"], sandbox={})
    assert re.match(r"the agent's program cannot run: the program could not be started: No such file", session.failure)
    assert given == []
