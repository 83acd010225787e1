import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mcp")

import mcp_calculator
from chat_model import Speaker, chat_prompt, in_turn, make_tokenizer, run_loop

from rl_core.errors import SettingsError, ToolError
from rl_rollout.loops import resolve_loop
from rl_rollout.tools import CallOptions, ToolBox, ToolCall, ToolRunner
from rl_rollout.tools.servers import McpServerOptions, connect_server

SCRIPT = str(Path(mcp_calculator.__file__))
COMMAND = (sys.executable, SCRIPT)
END = "<|im_end|>"


def children():
    """Command lines of this process's children that are calculators, by process id."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if int(lines["PPid"]) == os.getpid() and not lines["State"].startswith("Z"):
                command = (status.parent / "cmdline").read_bytes().decode()
                if SCRIPT in command:
                    found[int(status.parent.name)] = command
        except (OSError, KeyError):
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(children())
    yield
    assert set(children()) == before


def using(options, ask, **call_options):
    """Start a server, let `ask` use a runner of its tools, and close it."""
    server = connect_server("calculator", options)

    async def everything():
        tools = await server.start()
        return await ask(ToolRunner(ToolBox(tools), CallOptions(**call_options)))

    try:
        return asyncio.run(everything())
    finally:
        server.close()
        server.close()


def call(name, /, **arguments):
    return ToolCall(name=name, arguments=arguments)


def test_tools_are_listed_called_and_given_the_environment():
    async def ask(runner):
        assert len(children()) == 1
        return await runner.run(
            [
                call("add", a=20, b=22), call("environment", name="SHOP"), call("environment", name="RL_TEST_SECRET"),
                call("fail"), call("add", a="x", b=1),
            ]
        )  # fmt: skip

    os.environ["RL_TEST_SECRET"] = "kept here"
    try:
        results = using(McpServerOptions(command=COMMAND, env={"SHOP": "open"}), ask)
    finally:
        del os.environ["RL_TEST_SECRET"]
    assert [result.text for result in results[:3]] == ["42", "open", "none"]
    assert results[3].text == "Error: Error executing tool fail"  # the library hides what was raised
    assert [result.outcome for result in results] == ["ok", "ok", "ok", "raised", "raised"]


def test_the_schema_is_the_servers_and_tools_can_be_chosen():
    server = connect_server("calculator", McpServerOptions(command=COMMAND, tools=("add",)))
    try:
        (add,) = asyncio.run(server.start())
        assert (add.name, add.description) == ("add", "Add two whole numbers.")
        assert add.parameters["properties"]["a"]["type"] == "integer"
        assert asyncio.run(add.call({"a": 1, "b": 2})) == "3"  # on another event loop
    finally:
        server.close()
    with pytest.raises(ToolError, match="the server 'calculator' of this tool is closed"):
        asyncio.run(add.call({"a": 1, "b": 2}))
    with pytest.raises(SettingsError, match=r"MCP server 'c': unknown tool 'ad'. Did you mean 'add'\?"):
        asyncio.run(connect_and_close("c", McpServerOptions(command=COMMAND, tools=("ad",))))


async def connect_and_close(name, options):
    server = connect_server(name, options)
    try:
        return await server.start()
    finally:
        server.close()


def test_a_server_that_dies_is_started_again():
    async def ask(runner):
        (pid,) = children()
        died, told = await runner.run([call("die"), call("add", a=1, b=1)])
        assert died.text == "Error: the server of die died; the next call starts it again."
        assert told.outcome in ("ok", "raised")
        (after,) = await runner.run([call("add", a=1, b=1)])
        assert after.text == "2"
        (again,) = children()
        assert again != pid
        os.kill(again, signal.SIGKILL)
        outcomes = [(await runner.run([call("add", a=2, b=2)]))[0].text for _ in range(2)]
        assert outcomes == ["Error: the server of add died; the next call starts it again.", "4"]

    using(McpServerOptions(command=COMMAND), ask)


def test_a_server_that_dies_again_and_again_is_left_alone_for_a_while():
    async def ask(runner):
        texts = [(await runner.run([call("die")]))[0].text for _ in range(3)]
        assert texts[:2] == ["Error: the server of die died; the next call starts it again."] * 2
        assert "is down (died during a call of die" in texts[2]
        assert "I die." in texts[2]
        assert "it is tried again in" in texts[2]

    using(McpServerOptions(command=COMMAND), ask)


def test_a_slow_tool_times_out_while_its_server_stays():
    async def ask(runner):
        (pid,) = children()
        slow, quick = await runner.run([call("dawdle"), call("add", a=1, b=2)])
        assert (slow.outcome, quick.text) == ("timed_out", "3")
        assert (await runner.run([call("add", a=2, b=2)]))[0].text == "4"
        assert list(children()) == [pid]

    using(McpServerOptions(command=COMMAND), ask, timeout_s=0.5)


def test_a_server_that_freezes_is_replaced():
    async def ask(runner):
        (pid,) = children()
        (frozen,) = await runner.run([call("freeze")])
        assert frozen.outcome == "timed_out"
        deadline = time.monotonic() + 60
        while (await runner.run([call("add", a=2, b=2)]))[0].text != "4":
            assert time.monotonic() < deadline
        while pid in children():  # it gets 2 s to end by itself, and 2 s after SIGTERM
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    using(McpServerOptions(command=COMMAND, probe_timeout_s=0.2), ask, timeout_s=2)


def test_ten_megabytes_from_a_server_are_cut():
    async def ask(runner):
        (result,) = await runner.run([call("flood", size=10_000_000)])
        assert (result.outcome, len(result.text) < 200) == ("truncated", True)

    using(McpServerOptions(command=COMMAND), ask, max_result_chars=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": (sys.executable, "-c", "import sys; sys.exit('I cannot')")}, "did not start: .*I cannot"),
        ({"command": ("no-such-program",)}, "did not start: .*no-such-program: No such file or directory"),
        (
            {"command": (sys.executable, "-c", "import time; time.sleep(600)"), "start_timeout_s": 0.3},
            r"did not start: TimeoutError: no answer for 0\.3 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "did not start: ConnectError"),
    ],
)
def test_a_server_that_does_not_start_is_refused_with_its_reason(options, message):
    with pytest.raises(SettingsError, match=f"(?s)MCP server 'bad' {message}"):
        asyncio.run(connect_and_close("bad", McpServerOptions(**options)))


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def serve(port):
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        assert process.poll() is None
    raise AssertionError("the server did not come up")


def test_a_server_over_http_that_goes_away_and_comes_back():
    port = free_port()
    process = serve(port)

    async def ask(runner):
        nonlocal process
        (result,) = await runner.run([call("add", a=40, b=2)])
        assert result.text == "42"
        process.kill()
        process.wait()
        gone = [(await runner.run([call("add", a=1, b=1)]))[0].text for _ in range(2)]
        assert gone[0] == "Error: the server of add died; the next call starts it again."
        assert "did not start" in gone[1]
        process = serve(port)
        deadline = time.monotonic() + 60
        while (await runner.run([call("add", a=1, b=1)]))[0].text != "2":
            assert time.monotonic() < deadline

    try:
        options = McpServerOptions(url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "1"}, max_pause_s=0.1)
        using(options, ask, timeout_s=20)
    finally:
        process.kill()
        process.wait()


def test_the_loop_starts_the_servers_of_its_settings_and_ends_them():
    tokenizer = make_tokenizer()
    asked = json.dumps({"name": "add", "arguments": {"a": 20, "b": 22}})
    speaker = Speaker(tokenizer, in_turn(f"<tool_call>{asked}</tool_call>{END}", f"42{END}"))
    options = {"mcp_servers": {"calculator": {"command": ["python", SCRIPT], "tools": ["add"]}}}
    (group,) = run_loop(resolve_loop("tools", options), speaker, [chat_prompt(tokenizer, "20+22?")], num_sessions=2)
    assert group.failures == ()
    assert [t.extras["tool_calls"] for t in group.trajectories] == [{"ok": 1}] * 2
    (text,) = tokenizer.decode([group.trajectories[0].input_ids])
    assert "add: Add two whole numbers." in text
    assert "tool\n42" in text


def test_a_process_that_forgets_to_close_leaves_no_server_behind(tmp_path):
    script = (
        "import asyncio, os, pathlib, sys\n"
        "from rl_rollout.tools.servers import McpServerOptions, connect_server\n"
        f"server = connect_server('c', McpServerOptions(command={COMMAND!r}))\n"
        "tools = {tool.name: tool for tool in asyncio.run(server.start())}\n"
        "if sys.argv[1] == 'kill':\n"  # a frozen server does not see that its input was closed
        "    async def freeze():\n"
        "        await asyncio.wait([asyncio.create_task(tools['freeze'].call({}))], timeout=0.5)\n"
        "        report()\n"
        "def report():\n"
        "    kids = [p.parent.name for p in pathlib.Path('/proc').glob('[0-9]*/status')\n"
        "            if f'PPid:\\t{os.getpid()}\\n' in p.read_text()]\n"
        "    print(*kids, flush=True)\n"
        "    if sys.argv[1] == 'kill': os.kill(os.getpid(), 9)\n"
        "asyncio.run(freeze()) if sys.argv[1] == 'kill' else report()\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    for how in ("exit", "kill"):
        done = subprocess.run(
            [sys.executable, "-c", script, how],
            capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == (0 if how == "exit" else -9), done.stderr
        (pid,) = done.stdout.split()
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline
